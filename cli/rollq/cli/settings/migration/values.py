"""Values in the settings of another system that are not known before it runs. Pure."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that only the other system could compute, as it is written."""

    text: str


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A text that contains environment variables without a default: their names are in the place of their values."""

    text: str


@dataclass(frozen=True, slots=True)
class Named:
    """A function or class of the file itself, or what a dotted name of a library leads to."""

    name: str


@dataclass(slots=True)
class Made:
    """An object of a settings class: the name of the class and its arguments."""

    group: str
    fields: dict[str, Any] = field(default_factory=dict)


def shown(value: Any, longest: int = 100) -> str:
    """A value on one line, as the comments of the new file show it."""
    if isinstance(value, Unknown | Placeholder):
        text = value.text
    elif isinstance(value, Named):
        text = value.name
    elif isinstance(value, Made):
        text = f"{value.group}(...)"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {shown(item)}" for key, item in list(value.items())[:20]) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(shown(item) for item in value[:20]) + "]"
    else:
        text = repr(value)
    text = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
