"""JSON whose numbers keep all their digits. Pure.

JSON does not limit numbers; most readers turn one of more than 64 bits into the nearest float. Here an integer of any
length is an `int`. A number with a fraction or an exponent is a `float` if that has the digits that are written, and
else a text, the number as it is written: `0.1234567890123456789`, `1e400`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

_MAY_LOSE_DIGITS: Final = re.compile(rb"[0-9.]{17}|[0-9][eE][-+]?[0-9]{3}")
"""Matches all text with such a number, and little else."""
_SMALLEST: Final = -(1 << 63)
_LARGEST: Final = (1 << 64) - 1
"""The integers that orjson reads and writes."""


def loads(data: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises `ValueError` for other texts, and for integers of more than 4,300
    digits."""
    if not _MAY_LOSE_DIGITS.search(data):
        return orjson.loads(data)
    try:
        return json.loads(data.decode(), parse_float=number_of, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def dumps(value: Any, option: int = 0) -> bytes:
    """The JSON text of a value, with integers of any length. Raises `TypeError` for what is not JSON."""
    try:
        return orjson.dumps(value, option=option)
    except TypeError:
        return orjson.dumps(_with_long_integers(value), option=option)


def number_of(written: str) -> float | str:
    """A number with a fraction or an exponent: as a float, if that has the digits that are written, or as a text.

    >>> [number_of(text) for text in ("1.10", "0.10000000000000001", "3.14159265358979323846", "1e400", "1e-400")]
    [1.1, 0.1, '3.14159265358979323846', '1e400', '1e-400']
    """
    value = float(written)
    digits = _digits(written)
    if not digits or value in (0.0, float("inf"), float("-inf")):
        return written if digits else value
    if len(digits) <= 15 or _digits(f"{value:.{len(digits) - 1}e}") == digits:
        return value
    return written


def _digits(written: str) -> str:
    """The digits of a number without zeros on both ends and without its exponent."""
    return re.split("[eE]", written)[0].replace(".", "").lstrip("-").strip("0")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number of JSON")


def _with_long_integers(value: Any) -> Any:
    if isinstance(value, int) and not _SMALLEST <= value <= _LARGEST:
        return orjson.Fragment(str(value))
    if isinstance(value, Mapping):
        return {name: _with_long_integers(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_long_integers(item) for item in value]
    return value
