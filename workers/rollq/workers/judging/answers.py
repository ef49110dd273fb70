"""How judges read a row's answer. Pure.

answer       means
a list       several accepted answers
a number     itself, with the digits that the file has
a text       as its judge reads it: all of it, or its last number
the rest     itself, written as JSON

Functions that read an answer raise `ValueError` if their judge cannot use it: the row is wrong.
"""

from collections.abc import Callable
from itertools import starmap
from typing import Any, Final

from rollq.buffer.common import exact_json
from rollq.workers.judging.numbers import (
    Number,
    are_equal,
    decimal_text,
    is_ambiguous,
    last_number,
    number_of,
    only_number,
)

FINAL: Final = "####"
"""Precedes the final answer in GSM8K's references."""
PLACEHOLDER: Final = "{answer}"
"""The placeholder for a row's answer in the form of a correct text."""
SHOWN: Final = 80
"""The most characters of an answer that an error shows."""

AnswerReader = Callable[[Any], Any]
"""Reads a row's answer for a judge. Raises `ValueError` for an answer that the judge cannot use."""


def accepted(answer: Any) -> tuple[Any, ...]:
    """The accepted answers: the items of a list, or the single answer."""
    if answer is None:
        raise ValueError("the prompt has no answer")
    if answer == []:
        raise ValueError("the answer is an empty list, so no text would be right")
    return tuple(answer) if isinstance(answer, list | tuple) else (answer,)


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def equals(text: str, answer: Any) -> bool:
    """Whether a string is one of the accepted answers. Strings are compared without surrounding whitespace, numbers by
    value, and other values as JSON."""
    return any(_is_written(text, right) for right in accepted(answer))


def equals_as_number(text: str, answer: Any) -> bool:
    """Like `equals`, but also compares numbers written as strings by value."""
    number = only_number(text)
    for right in accepted(answer):
        expected = only_number(right) if isinstance(right, str) else None
        if number is not None and expected is not None and are_equal(number, expected):
            return True
        if _is_written(text, right):
            return True
    return False


def numbers_of(answer: Any) -> tuple[Number, ...]:
    """The last number of each accepted answer."""
    return tuple(map(_last_number_of, accepted(answer)))


def expressions_of(answer: Any) -> tuple[str, ...]:
    """Each accepted answer as an expression: the part after `####`, or all of it."""
    return tuple(map(_expression_of, accepted(answer)))


def _is_written(text: str, answer: Any) -> bool:
    if isinstance(answer, str):
        return text.strip() == answer.strip()
    if is_number(answer):
        number = only_number(text)
        return number is not None and are_equal(number, number_of(answer))
    try:
        return _are_same(exact_json.loads_as_written(text), answer)
    except ValueError:
        return False


def _are_same(first: Any, second: Any) -> bool:
    """Whether two values are the same JSON. The order of an object's names does not matter, and 1 equals 1.0."""
    if is_number(first) and is_number(second):
        return number_of(first) == number_of(second)
    if isinstance(first, list) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(starmap(_are_same, zip(first, second, strict=True)))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_are_same(value, second[name]) for name, value in first.items())
    return type(first) is type(second) and bool(first == second)


def _last_number_of(answer: Any) -> Number:
    if is_number(answer):
        return number_of(answer)
    number = last_number(answer) if isinstance(answer, str) else None
    if number is None:
        raise ValueError(f"the answer {answer!r:.{SHOWN}} has no number")
    if is_ambiguous(answer):
        raise ValueError(f"the answer {answer!r:.{SHOWN}} is ambiguous as a number; write 1234.5 or 1,234.5")
    return number


def _expression_of(answer: Any) -> str:
    if is_number(answer):
        return decimal_text(number_of(answer))
    if not isinstance(answer, str):
        raise ValueError(f"the answer {answer!r:.{SHOWN}} is not an expression; expected a string or a number")
    expression = answer.rpartition(FINAL)[2].strip()
    if not expression:
        raise ValueError(f"the answer {answer!r:.{SHOWN}} is empty")
    return expression
