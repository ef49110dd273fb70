"""The names of runs and tasks, which become parts of keys, queues and folders. Pure."""

import re

from rollq.buffer.errors import ConfigError

NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]{1,64}")


def is_name(text: bytes) -> bool:
    """Whether a run's or task's name, as the server stores it, is valid."""
    return NAME.fullmatch(text.decode(errors="replace")) is not None


def check_name(kind: str, name: str) -> str:
    """Return `name`. Raises `ConfigError` if it cannot be a part of keys, or looks like a settings file."""
    if not NAME.fullmatch(name):
        shown = name if len(name) <= 80 else name[:77] + "..."
        raise ConfigError(f"{kind} name {shown!r}: 1 to 64 characters of A-Z a-z 0-9 _ . - are allowed, not dots alone")
    if name.endswith(".toml"):
        raise ConfigError(f"{kind} name {name!r}: must not end in .toml, which marks the settings file of a command")
    return name
