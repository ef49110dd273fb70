"""Says which answers may reach a grader that runs them as code. Pure.

Code needs words: without names of functions and attributes, and without texts to make such names from, there is only
arithmetic.
"""

import re
from typing import Final

RUN_BY_PYTHON: Final = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Generators whose graders pass the answer to Python's `eval`."""
RUN_BY_SYMPY: Final = frozenset({
    "countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration",
})  # fmt: skip
"""Generators whose graders pass the answer to sympy's parser, which evaluates it."""
RUN_TEXTS: Final = RUN_BY_PYTHON | RUN_BY_SYMPY
"""Generators whose graders run the model's text as code."""

_WORD: Final = re.compile(r"\w*[^\W\d]\w*")
_CELL: Final = re.compile(r"[A-Z]+|_")
"""A cell of a board, or letters in capitals; Python has no function of such a name."""
_VARIABLE: Final = re.compile(r"\d*[A-Za-z]|\d+[eE]\d+")
_MATHEMATICS: Final = frozenset({
    "Abs", "Integral", "acos", "acosh", "acot", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "coth", "csc",
    "csch", "erf", "exp", "ln", "log", "pi", "sec", "sech", "sin", "sinh", "sqrt", "tan", "tanh",
})  # fmt: skip


def is_plain(generator: str, answer: str) -> bool:
    """Whether an answer to one of `RUN_TEXTS` is nothing but a board, letters or a formula."""
    if not answer.isascii():  # Python reads some other letters as these
        return False
    words = _WORD.findall(answer)
    if generator in RUN_BY_PYTHON:
        return "\\" not in answer and all(_CELL.fullmatch(word) for word in words)
    return not set("'\"\\") & set(answer) and all(_VARIABLE.fullmatch(word) or word in _MATHEMATICS for word in words)
