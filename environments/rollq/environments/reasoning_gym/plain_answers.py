"""Decides which answers may reach a grader that runs them as code. Pure.

Code needs words: without function and attribute names, and without strings to build such names, only arithmetic
remains. Some answers need mathematical names. In other answers, such names would bypass the question.
"""

import re
from typing import Final

BOARDS: Final = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Generators whose graders pass a board or letters to Python's `eval`."""
FORMULAS: Final = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})
"""Generators whose graders pass a formula to sympy's parser, which evaluates it."""
SUMS: Final = frozenset({"countdown", "puzzle24"})
"""Generators whose graders evaluate a sum in which each number must be used once."""
RUN_TEXTS: Final = BOARDS | FORMULAS | SUMS
"""Generators whose graders run the model's text as code."""

_WORD: Final = re.compile(r"\w*[^\W\d]\w*")
_CELL: Final = re.compile(r"[A-Z]+|_")
"""A cell of a board, or capital letters; no Python function has such a name."""
_VARIABLE: Final = re.compile(r"\d*[A-Za-z]|\d+[eE]\d+")
_FUNCTIONS: Final = frozenset({
    "Abs", "acos", "acosh", "acot", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "coth", "csc", "csch",
    "erf", "exp", "ln", "log", "pi", "sec", "sech", "sin", "sinh", "sqrt", "tan", "tanh",
})  # fmt: skip
_UNSOLVED: Final = "Integral"
"""A formula with this name could repeat the question, which the grader accepts. Some reference answers contain the
name."""
_SUM: Final = re.compile(r"[\d()+\-*/\s]*", re.ASCII)
_WAY_AROUND: Final = re.compile(r"\*\s*\*|/\s*/")
"""Powers and rounding: `7**0` is 1, so a number can be used up without effect."""


def is_plain(generator: str, answer: str, own: str) -> bool:
    """Whether an answer to one of `RUN_TEXTS` is only a board, letters, a formula, or a sum.

    `own` is the row's answer.
    """
    if not answer.isascii():  # Python normalises some other letters to ASCII
        return False
    if generator in SUMS:
        return bool(_SUM.fullmatch(answer)) and not _WAY_AROUND.search(answer)
    words = set(_WORD.findall(answer))
    if generator in BOARDS:
        return "\\" not in answer and all(_CELL.fullmatch(word) for word in words)
    allowed = _FUNCTIONS | ({_UNSOLVED} if _UNSOLVED in own else set())
    return not set("'\"\\") & set(answer) and all(_VARIABLE.fullmatch(word) for word in words - allowed)
