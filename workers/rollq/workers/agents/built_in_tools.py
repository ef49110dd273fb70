"""Tools that come with rollq: a calculator and a lookup table."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from rollq.buffer.values.rollouts import Prompt
from rollq.workers.agents.tool_calls import CallError

MAX_EXPRESSION = 400
"""The largest number of characters in an expression. It also bounds how deep parentheses nest."""
MAX_BITS = 4096
"""The largest absolute value of an integer, in bits."""

Number = int | float


def calculator(expression: str) -> str:
    """Work out an arithmetic expression: numbers, + - * / // % ** and parentheses."""
    if len(expression) > MAX_EXPRESSION:
        raise CallError(f"the expression has {len(expression)} characters; {MAX_EXPRESSION} are allowed")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError) as error:
        raise CallError(f"cannot work out {expression!r}: {error}") from error
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise ArithmeticError("the power is too large")
    value: Any = base**exponent
    if isinstance(value, complex):
        raise ArithmeticError("the power is not a real number")
    real: Number = value
    return real


OPERATORS: Final[Mapping[type[ast.operator], Callable[[Any, Any], Number]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _value(node: ast.expr) -> Number:
    """The value of an expression's part. Raises `ValueError` for anything but arithmetic."""
    value: Number
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _value(operand)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")
    if _is_too_large(value):
        raise ArithmeticError("the number is too large")
    return value


def _is_too_large(value: Number) -> bool:
    return value.bit_length() > MAX_BITS if isinstance(value, int) else not math.isfinite(value)


class Lookup:
    """Look up a key in a table."""

    def __init__(self, table: Mapping[str, Any] | None = None) -> None:
        """`table` serves all prompts. Without it, each prompt's metadata has its table in the column `table`."""
        self._table = table

    def __call__(self, key: str, prompt: Prompt) -> Any:
        table = prompt.metadata.get("table", {}) if self._table is None else self._table
        if key not in table:
            raise CallError(f"the table has no entry {key!r}")
        return table[key]
