"""What judges compare: a sample's text with a reference answer. Pure functions of texts; most run in a process of
their own."""

import logging
import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
FINAL = "####"
"""Before the final answer, in GSM8K's references."""


def last_number(text: str) -> float | None:
    """The last number of a text; None without one."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def match_pattern(text: str, answer: Any, pattern: str, compare: bool) -> float:
    """1 when `pattern` occurs in the text and, with `compare`, what it found last equals the answer; else 0.

    What it found is its first group, or all of it when it has none. Numbers are compared as numbers, all else as text
    without the spaces around it.
    """
    found = [(match[1] or "") if match.re.groups else match[0] for match in re.finditer(pattern, text)]
    if not compare or not found:
        return float(bool(found))
    return float(_comparable(found[-1]) == _comparable(str(answer)))


def _comparable(text: str) -> Decimal | str:
    text = text.strip()
    return Decimal(text.replace(",", "")) if NUMBER.fullmatch(text) else text


def match_math(text: str, answer: Any) -> float:
    """1 when the text's final expression equals the answer's as mathematics, by the library math-verify; else 0.

    Raises `ValueError` when the answer is no expression: such a prompt cannot be judged.
    """
    from math_verify import parse, verify

    # Its own timeouts use signals, and it warns when they are off; the process that runs this has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = str(answer).rpartition(FINAL)[2].strip()
    expected = parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", parsing_timeout=None)
    if not expected:
        raise ValueError(f"the answer {answer!r:.80} is no expression that math-verify can read")
    return float(verify(expected, parse(text, parsing_timeout=None), timeout_seconds=None))
