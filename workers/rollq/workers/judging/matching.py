"""Comparisons for a separate process: they may take long or never end. Pure."""

import logging
import re
from typing import Any, Final

from rollq.workers.judging.answers import SHOWN, equals_as_number, expressions_of
from rollq.workers.judging.numbers import Number, are_equal, only_number, with_plain_powers

_BOX: Final = re.compile(r"\\boxed\s*(?:\{|(?=\w))")
_DELIMITED: Final = re.compile(r"\\boxed|\$")


def match_pattern(text: str, answer: Any, pattern: str, compare: bool) -> float:
    """1 if `pattern` occurs in the text and, with `compare`, its last match equals the answer; otherwise 0.

    Only the first group of a match counts, or the whole match if the pattern has no groups. Numbers are compared as
    numbers, other strings without surrounding whitespace.
    """
    matches = [(match[1] or "") if match.re.groups else match[0] for match in re.finditer(pattern, text)]
    if not compare or not matches:
        return float(bool(matches))
    return float(equals_as_number(matches[-1], answer))


def _number_of(parsed: list[Any]) -> Number | None:
    """The number that math-verify has read; None if it has read something else."""
    return only_number(parsed[-1]) if parsed and isinstance(parsed[-1], str) else None


def match_math(text: str, answer: Any) -> float:
    """1 if the text's final expression and an accepted answer's are mathematically equal; otherwise 0.

    The final expression is in the last `\\boxed{}`, or the library math-verify finds it. Two numbers are compared
    exactly; the library compares everything else. Raises `ValueError` for an answer that is not an expression: the
    prompt cannot be judged.
    """
    from math_verify import parse, verify

    # math-verify's timeouts use signals, and it warns when they are off; the judge process has a timeout instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    said = parse(with_plain_powers(last_box(text)), parsing_timeout=None)
    said_number = _number_of(said)
    for expression in expressions_of(answer):
        plain = with_plain_powers(expression)
        expected = parse(plain if _DELIMITED.search(plain) else f"${plain}$", parsing_timeout=None)
        if not expected:
            raise ValueError(f"the answer {expression!r:.{SHOWN}} cannot be read by math-verify as an expression")
        number = _number_of(expected)
        if number is not None and said_number is not None:
            is_right = are_equal(number, said_number)
        else:
            is_right = verify(expected, said, timeout_seconds=None)
        if is_right:
            return 1.0
    return 0.0


def last_box(text: str) -> str:
    """The last complete `\\boxed{}` in a text, or the text itself if it has none."""
    for match in reversed(list(_BOX.finditer(text))):
        if not match[0].endswith("{"):
            return f"\\boxed{{{text[match.end()]}}}"
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
            if depth == 0:
                return f"\\boxed{{{text[match.end() : end]}}}"
    return text
