"""Parses whole numbers in external texts. Pure."""

from typing import Final

MOST_DIGITS: Final = 15
"""Digits of numbers that JSON, Lua and Redis keep exactly."""
LIMIT: Final = 10**MOST_DIGITS
"""The smallest number with more digits."""


def whole_number(text: str) -> int | None:
    """Parse a number written in decimal digits; returns None for any other text and for more than `MOST_DIGITS`.

    >>> [whole_number(text) for text in ("12", "-1", "", "²", "9" * 5000)]
    [12, None, None, None, None]
    """
    is_number = text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS
    return int(text) if is_number else None
