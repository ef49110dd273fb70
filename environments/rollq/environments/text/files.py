"""Digests of the files beside `rollq.toml` that episodes are made from."""

import hashlib
from pathlib import Path
from typing import Final

from rollq.buffer.errors import ConfigError

MISSING: Final = "missing"


def digest_of_file(path: Path) -> str:
    """The digest of a file's content; "missing" without the file, which only a role that makes rows needs. Raises
    `ConfigError`."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def digest_of_code(folder: Path, module: str) -> str:
    """The digest of the source of a top-level module or package in `folder`; empty if it is not there. Raises
    `ConfigError`."""
    files = [path for path in (folder / f"{module}.py", *sorted((folder / module).rglob("*.py"))) if path.is_file()]
    parts = [f"{path.relative_to(folder)} {digest_of_file(path)}" for path in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if parts else ""
