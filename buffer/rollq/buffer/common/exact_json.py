"""JSON whose integers keep all of their digits. Pure.

orjson reads an integer of more than 64 bits as a float, and refuses to write such an integer. Everything else works as
in orjson, except nesting: orjson reads 1,024 levels and writes 254, so values nested deeper than `MOST_LEVELS` are
refused when read.
"""

import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any, Final, Never

import orjson

MOST_LEVELS: Final = 254
"""The deepest nesting that orjson writes, so that every value that can be read can be written."""
_ZEROS: Final = bytes.maketrans(b"123456789", b"000000000")
_LONG: Final = b"0" * 19
"""Digits of the shortest integer that 64 bits do not hold, as `_ZEROS` makes them."""
_HUGE: Final = re.compile(r"(\d{300})\d+")
_MAY_LOSE_DIGITS: Final = re.compile(rb"[0-9.]{17}|[0-9][eE][-+]?[0-9]{3}")
_BITS: Final = range(-(1 << 63), 1 << 64)


def loads(text: bytes | memoryview | str) -> Any:
    """Parse a JSON text. Raises `ValueError` for an invalid text, for nesting deeper than `MOST_LEVELS`, and for an
    integer of more than 4,300 digits, the most that Python reads."""
    data = text.encode(errors="replace") if isinstance(text, str) else bytes(text)
    if _LONG not in data.translate(_ZEROS):
        return _not_too_deep(data, orjson.loads(text))
    text = text if isinstance(text, str) else data.decode()
    orjson.loads(_HUGE.sub(r"\1", text))  # refuses what the other parser takes: NaN, halves of surrogate pairs
    try:
        return _not_too_deep(data, _DECODER.decode(text))
    except RecursionError:
        raise _too_deep() from None


def loads_as_written(text: bytes | memoryview | str) -> Any:
    """Like `loads`, but a number with a fraction or an exponent becomes a string with the original spelling if a float
    cannot keep all its digits. Used for content that people write, such as answers in rows."""
    data = text.encode(errors="replace") if isinstance(text, str) else bytes(text)
    if not _MAY_LOSE_DIGITS.search(data):
        return _not_too_deep(data, orjson.loads(text))
    text = text if isinstance(text, str) else data.decode()
    try:
        value = _not_too_deep(data, _DECODER_AS_WRITTEN.decode(text))
        dumps(value)  # refuses halves of surrogate pairs
    except RecursionError:
        raise _too_deep() from None
    except TypeError as error:
        raise ValueError(str(error)) from None
    return value


def _not_too_deep(data: bytes, value: Any) -> Any:
    """Return `value`, parsed from `data`. Raises `ValueError` if it is nested too deeply to be checked or written."""
    if data.count(b"[") + data.count(b"{") <= MOST_LEVELS:
        return value
    level = _nested([value])
    for _ in range(MOST_LEVELS):
        if not (level := [each for one in level for each in _nested(one)]):
            return value
    raise _too_deep()


def _nested(one: Any) -> list[Any]:
    """The objects and lists in an object or a list."""
    return [each for each in (one.values() if isinstance(one, dict) else one) if isinstance(each, dict | list)]


def _too_deep() -> ValueError:
    return ValueError(f"the JSON is nested more than {MOST_LEVELS} levels deep")


def number_as_written(written: str) -> float | str:
    """Convert a number with a fraction or an exponent to a float if the float keeps all digits, else to a string.

    >>> [number_as_written(text) for text in ("1.10", "0.10000000000000001", "3.14159265358979323846", "1e400")]
    [1.1, 0.1, '3.14159265358979323846', '1e400']
    """
    value = float(written)
    digits = _digits(written)
    if not digits or value in (0.0, math.inf, -math.inf):
        return written if digits else value
    is_normal = abs(value) >= sys.float_info.min  # a smaller number keeps fewer than 15 digits
    if (is_normal and len(digits) <= 15) or _digits(f"{value:.{len(digits) - 1}e}") == digits:
        return value
    return written


def _digits(written: str) -> str:
    """A number's digits, without zeros on either end and without the exponent."""
    return re.split("[eE]", written)[0].replace(".", "").lstrip("-").strip("0")


def dumps(value: Any, default: Callable[[Any], Any] | None = None, option: int = 0) -> bytes:
    """Encode a value as JSON, as orjson does. Raises `TypeError` for values that JSON lacks."""
    try:
        return orjson.dumps(value, default, option)
    except TypeError:
        try:
            written = _with_digits(value)
        except RecursionError:
            written = value
        return orjson.dumps(written, default, option)


def _with_digits(value: Any) -> Any:
    """The value, with integers that orjson refuses replaced by their digits."""
    if isinstance(value, dict):
        return {key: _with_digits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_digits(each) for each in value]
    if isinstance(value, int) and value not in _BITS:
        return orjson.Fragment(str(value))
    return value


def _finite(number: str) -> float:
    found = float(number)
    if math.isinf(found):
        raise ValueError(f"the number {number[:40]} is infinite as a double")
    return found


def _refuse(constant: str) -> Never:
    raise ValueError(f"{constant} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)
_DECODER_AS_WRITTEN: Final = json.JSONDecoder(parse_float=number_as_written, parse_constant=_refuse)
