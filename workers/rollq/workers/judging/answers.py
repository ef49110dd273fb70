"""The meaning of a row's answer to the judges that compare with it. Pure.

answer       means
a list       several accepted answers
a number     itself, with the digits that the file has
a text       what a judge reads in it: all of it, or its last number
the rest     itself, as JSON writes it

Functions that read an answer raise `ValueError` for one that their judge cannot use, which is a mistake in the row.
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
"""Before the final answer, in GSM8K's references."""
PLACEHOLDER: Final = "{answer}"
"""In the form of a right text, where the answer of a row comes."""
SHOWN: Final = 80
"""Characters of an answer that an error shows."""

AnswerReader = Callable[[Any], Any]
"""Reads what a judge compares with. Raises `ValueError` for an answer that the judge cannot use."""


def accepted(answer: Any) -> tuple[Any, ...]:
    """The answers that are right: those of a list, or the one."""
    if answer is None:
        raise ValueError("the prompt has no answer")
    if answer == []:
        raise ValueError("the answer is an empty list, so no text would be right")
    return tuple(answer) if isinstance(answer, list | tuple) else (answer,)


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def equals(text: str, answer: Any) -> bool:
    """Whether a text is one of the accepted answers: a text without surrounding whitespace, a number by its value, and
    the rest as JSON."""
    return any(_is_written(text, one) for one in accepted(answer))


def equals_as_number(text: str, answer: Any) -> bool:
    """As `equals`, but answers that are texts of numbers are compared by their value, too."""
    number = only_number(text)
    for one in accepted(answer):
        expected = only_number(one) if isinstance(one, str) else None
        if number is not None and expected is not None and are_equal(number, expected):
            return True
        if _is_written(text, one):
            return True
    return False


def numbers_of(answer: Any) -> tuple[Number, ...]:
    """The last number of each accepted answer."""
    return tuple(map(_last_number_of, accepted(answer)))


def expressions_of(answer: Any) -> tuple[str, ...]:
    """Each accepted answer as an expression: what comes after `####`, or all of it."""
    return tuple(map(_expression_of, accepted(answer)))


def _is_written(text: str, one: Any) -> bool:
    if isinstance(one, str):
        return text.strip() == one.strip()
    if is_number(one):
        number = only_number(text)
        return number is not None and are_equal(number, number_of(one))
    try:
        return _are_same(exact_json.loads_as_written(text), one)
    except ValueError:
        return False


def _are_same(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON: the order of an object's names does not matter, and 1 is 1.0."""
    if is_number(one) and is_number(other):
        return number_of(one) == number_of(other)
    if isinstance(one, list) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(starmap(_are_same, zip(one, other, strict=True)))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_same(value, other[name]) for name, value in one.items())
    return type(one) is type(other) and bool(one == other)


def _last_number_of(one: Any) -> Number:
    if is_number(one):
        return number_of(one)
    found = last_number(one) if isinstance(one, str) else None
    if found is None:
        raise ValueError(f"the answer {one!r:.{SHOWN}} holds no number")
    if is_ambiguous(one):
        raise ValueError(
            f"the answer {one!r:.{SHOWN}} can be read as several numbers; write 1234.5, or 1,234.5 if need be"
        )
    return found


def _expression_of(one: Any) -> str:
    if is_number(one):
        return decimal_text(number_of(one))
    if not isinstance(one, str):
        raise ValueError(f"the answer {one!r:.{SHOWN}} is not an expression; a text or a number is needed")
    expression = one.rpartition(FINAL)[2].strip()
    if not expression:
        raise ValueError(f"the answer {one!r:.{SHOWN}} is empty")
    return expression
