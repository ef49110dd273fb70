"""Converts another system's values to a setting's type, or to None if a value does not fit. Pure."""

import re
from typing import Any, Final

LARGEST: Final = 2**63
_NUMBER: Final = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_WORDS: Final = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False,
                 "0": False}  # fmt: skip


def whole_number(value: Any) -> int | None:
    """A whole number: 8, 8.0 or "8"."""
    number = a_number(value)
    return int(number) if number is not None and number == number // 1 and abs(number) < LARGEST else None


def a_number(value: Any) -> float | None:
    """A number, or a string with a number."""
    if isinstance(value, str):
        return _parsed(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, float) or abs(value) < LARGEST else None


def _parsed(text: str) -> float | None:
    if len(text) >= 100 or not _NUMBER.fullmatch(text):
        return None
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def yes_or_no(value: Any) -> bool | None:
    """True or false, including 1 and 0, and OmegaConf's words for them."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return bool(value) if value in (0, 1) else None
    return _WORDS.get(value.lower()) if isinstance(value, str) else None


def a_text(value: Any) -> str | None:
    """A string."""
    return value if isinstance(value, str) else None
