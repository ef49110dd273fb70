"""Comparisons of a sample's text with a reference answer. Pure functions of texts; most run in a separate process."""

import logging
import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
FINAL = "####"
"""Before the final answer, in GSM8K's references."""


def last_number(text: str) -> float | None:
    """The last number of a text; None without one."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def match_pattern(text: str, answer: Any, pattern: str, compare: bool) -> float:
    """1 if `pattern` occurs in the text and, with `compare`, its last match equals the answer; else 0.

    A match counts with its first group, or as a whole if the pattern has no groups. Numbers are compared as numbers,
    other texts without surrounding whitespace.
    """
    matches = [(match[1] or "") if match.re.groups else match[0] for match in re.finditer(pattern, text)]
    if not compare or not matches:
        return float(bool(matches))
    return float(_comparable(matches[-1]) == _comparable(str(answer)))


def _comparable(text: str) -> Decimal | str:
    text = text.strip()
    return Decimal(text.replace(",", "")) if NUMBER.fullmatch(text) else text


def match_math(text: str, answer: Any) -> float:
    """1 when the text's final expression equals the answer's as mathematics, by the library math-verify; else 0.

    Raises `ValueError` when the answer is not an expression, because the prompt cannot be judged.
    """
    from math_verify import parse, verify

    # math-verify's timeouts use signals, and it warns when they are off; the judge process has a timeout instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = str(answer).rpartition(FINAL)[2].strip()
    expected = parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", parsing_timeout=None)
    if not expected:
        raise ValueError(f"the answer {answer!r:.80} cannot be read by math-verify as an expression")
    return float(verify(expected, parse(text, parsing_timeout=None), timeout_seconds=None))
