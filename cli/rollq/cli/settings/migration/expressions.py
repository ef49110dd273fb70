"""Python's operators, functions and methods, for values that may be unknown. Pure.

They return `NotImplemented` where the result is unknown, or could be large.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from rollq.cli.settings.migration.values import Named, Placeholder, Unknown

LARGEST: Final = 2**63
LONGEST_TEXT: Final = 10_000

Texts = (str, Placeholder)


def as_text(value: Any) -> Any:
    """`str(value)`, of known values."""
    if isinstance(value, Texts):
        return value
    return str(value) if isinstance(value, bool | int | float) or value is None else Unknown("text")


def joined(separator: str, parts: list[Any]) -> Any:
    """The text of several, with the names of unset environment variables in it."""
    if not all(isinstance(part, Texts) for part in parts):
        return NotImplemented
    text = separator.join(part if isinstance(part, str) else part.text for part in parts)
    if len(text) > LONGEST_TEXT:
        return NotImplemented
    return text if all(isinstance(part, str) for part in parts) else Placeholder(text)


def _numbers(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """An operator for numbers that are not too large."""

    def safe(left: Any, right: Any) -> Any:
        if not all(isinstance(value, int | float) and abs(value) < LARGEST for value in (left, right)):
            return NotImplemented
        try:
            return compute(left, right)
        except (ArithmeticError, ValueError):
            return NotImplemented

    return safe


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, Texts) and isinstance(right, Texts):
        return joined("", [left, right])
    if isinstance(left, list) and isinstance(right, list):
        return [*left, *right] if len(left) + len(right) <= LONGEST_TEXT else NotImplemented
    return _numbers(operator.add)(left, right)


def _power(left: Any, right: Any) -> Any:
    return NotImplemented if isinstance(right, int | float) and abs(right) > 64 else _numbers(operator.pow)(left, right)


def _divided(left: Any, right: Any) -> Any:
    """A quotient, or a path below another, as `Path(left) / right`."""
    return path(left, right) if isinstance(left, Texts) else _numbers(operator.truediv)(left, right)


BINARY: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: _add,
    ast.Sub: _numbers(operator.sub),
    ast.Mult: _numbers(operator.mul),
    ast.Div: _divided,
    ast.FloorDiv: _numbers(operator.floordiv),
    ast.Mod: _numbers(operator.mod),
    ast.Pow: _power,
}
UNARY: Final[Mapping[type[ast.unaryop], Callable[[Any], Any]]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
COMPARISONS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: lambda left, right: left is right,
    ast.IsNot: lambda left, right: left is not right,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


def path(*parts: Any) -> Any:
    """`os.path.join`, with forward slashes."""
    known = [part for part in parts if part != ""]
    if known and all(isinstance(part, Texts) for part in known):
        ends = [part.removesuffix("/") if isinstance(part, str) else part for part in known[:-1]]
        return joined("/", [*ends, known[-1]])
    return NotImplemented


def _converted(convert: Callable[[Any], Any]) -> Callable[..., Any]:
    """`int`, `float` or `bool`, of a known value."""

    def safe(*arguments: Any) -> Any:
        if len(arguments) != 1 or isinstance(arguments[0], Unknown | Placeholder | Named):
            return NotImplemented
        try:
            return convert(arguments[0])
        except (TypeError, ValueError, OverflowError):
            return NotImplemented

    return safe


def _chosen(choose: Callable[..., Any]) -> Callable[..., Any]:
    """`max` or `min`, of numbers."""

    def safe(*arguments: Any) -> Any:
        return (
            choose(arguments)
            if arguments and all(isinstance(argument, int | float) for argument in arguments)
            else NotImplemented
        )

    return safe


def _dictionary(*arguments: Any, **named: Any) -> Any:
    first = arguments[0] if arguments else {}
    return first | named if isinstance(first, dict) else NotImplemented


FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "int": _converted(int),
    "float": _converted(float),
    "bool": _converted(bool),
    "str": lambda *arguments: as_text(arguments[0]) if len(arguments) == 1 else NotImplemented,
    "Path": path,
    "os.path.join": path,
    "max": _chosen(max),
    "min": _chosen(min),
    "len": lambda *arguments: len(arguments[0]) if isinstance(arguments[0], list | tuple | dict) else NotImplemented,
    "list": lambda *arguments: (
        list(arguments[0]) if arguments and isinstance(arguments[0], list | tuple) else NotImplemented
    ),
    "dict": _dictionary,
}


def _of_text(method: str) -> Callable[..., Any]:
    def safe(owner: Any, *arguments: Any) -> Any:
        if isinstance(owner, str) and all(isinstance(argument, str) for argument in arguments):
            try:
                return getattr(owner, method)(*arguments)
            except (TypeError, ValueError):
                return NotImplemented
        return NotImplemented

    return safe


def _get(owner: Any, *arguments: Any) -> Any:
    if not isinstance(owner, dict) or not arguments or not isinstance(arguments[0], str | int):
        return NotImplemented
    return owner.get(arguments[0], arguments[1] if len(arguments) > 1 else None)


METHODS: Final[Mapping[str, Callable[..., Any]]] = {
    **{name: _of_text(name) for name in ("lower", "upper", "strip", "split", "startswith", "endswith")},
    "get": _get,
    "items": lambda owner: list(owner.items()) if isinstance(owner, dict) else NotImplemented,
    "values": lambda owner: list(owner.values()) if isinstance(owner, dict) else NotImplemented,
}
