"""Python's operators, functions and methods, for values that may be unknown. Pure.

They return `NotImplemented` for results that are unknown or could be large.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from rollq.cli.settings.migration.values import REST, Placeholder, Several, Unknown, are_all, is_known, same

LARGEST: Final = 2**63
LONGEST_TEXT: Final = 10_000

Texts = (str, Placeholder)


def as_text(value: Any) -> Any:
    """`str(value)` for known values."""
    if isinstance(value, Texts):
        return value
    if isinstance(value, bool | float) or value is None or (isinstance(value, int) and abs(value) < LARGEST):
        return str(value)
    return Unknown("text")


def joined(separator: str, parts: list[Any]) -> Any:
    """The joined text of several values, including the names of unset environment variables."""
    if not are_all(Texts, parts):
        return NotImplemented
    text = separator.join(part if isinstance(part, str) else part.text for part in parts)
    if len(text) > LONGEST_TEXT:
        return NotImplemented
    return text if are_all(str, parts) else Placeholder(text)


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
    for kind in (list, tuple):
        if isinstance(left, kind) and isinstance(right, kind):
            return kind((*left, *right)) if len(left) + len(right) <= LONGEST_TEXT else NotImplemented
    return _numbers(operator.add)(left, right)


def _power(left: Any, right: Any) -> Any:
    return NotImplemented if isinstance(right, int | float) and abs(right) > 64 else _numbers(operator.pow)(left, right)


def _times(left: Any, right: Any) -> Any:
    if isinstance(left, list) and isinstance(right, int):
        return left * right if len(left) * right <= LONGEST_TEXT else NotImplemented
    return _numbers(operator.mul)(left, right)


def _or(left: Any, right: Any) -> Any:
    return with_keys(left, right) if isinstance(left, dict) and isinstance(right, dict) else NotImplemented


def with_keys(base: dict[Any, Any], over: dict[Any, Any]) -> dict[Any, Any]:
    """`base | over`. If `over` could have any key, the values from `base` are unknown."""
    return dict(over) if REST in over else base | over


def whole(value: Any) -> bool:
    """Whether all items of a list, or all keys of a dictionary, are known."""
    if isinstance(value, dict):
        return REST not in value
    return isinstance(value, list | tuple) and not any(isinstance(item, Several) for item in value)


def truth(value: Any) -> bool | None:
    """Whether a value is true; None if unknown."""
    if not is_known(value) or (isinstance(value, dict | list | tuple) and not whole(value)):
        return None
    return bool(value)


def _divided(left: Any, right: Any) -> Any:
    """A quotient, or a path below another, as `Path(left) / right`."""
    return path(left, right) if isinstance(left, Texts) else _numbers(operator.truediv)(left, right)


BINARY: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: _add,
    ast.Sub: _numbers(operator.sub),
    ast.Mult: _times,
    ast.Div: _divided,
    ast.FloorDiv: _numbers(operator.floordiv),
    ast.Mod: _numbers(operator.mod),
    ast.Pow: _power,
    ast.BitOr: _or,
}
UNARY: Final[Mapping[type[ast.unaryop], Callable[[Any], Any]]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}


def _equal(left: Any, right: Any) -> Any:
    """`left == right` for values without unknown parts."""
    if are_all(bool | int | float | str | None, (left, right)):
        return left == right
    if not (is_known(left) and is_known(right)):
        return NotImplemented
    if type(left) is not type(right):
        return False
    return _are_empty(left, right) if isinstance(left, list | tuple | dict) else NotImplemented


def _are_empty(left: Any, right: Any) -> Any:
    """Whether both values are empty, if one is."""
    if (left and right) or not (whole(left) and whole(right)):
        return NotImplemented
    return not left and not right


def _contained(left: Any, right: Any) -> Any:
    if isinstance(right, str):
        return left in right if isinstance(left, str) else NotImplemented
    if isinstance(right, dict):
        return _is_key(left, right)
    return _is_item(left, right) if isinstance(right, list | tuple) else NotImplemented


def _is_key(left: Any, right: dict[Any, Any]) -> Any:
    if not isinstance(left, str | int):
        return NotImplemented
    return True if left in right and left != REST else False if whole(right) else NotImplemented


def _is_item(left: Any, right: list[Any] | tuple[Any, ...]) -> Any:
    results = [_equal(left, item) for item in right]
    return True if any(one is True for one in results) else NotImplemented if NotImplemented in results else False


def _is(left: Any, right: Any) -> Any:
    if left is None or right is None:
        return NotImplemented if not (is_known(left) and is_known(right)) else left is right
    return same(left, right) if isinstance(left, bool) and isinstance(right, bool) else NotImplemented


def _not(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def safe(left: Any, right: Any) -> Any:
        result = compare(left, right)
        return result if result is NotImplemented else not result

    return safe


def _ordered(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def safe(left: Any, right: Any) -> Any:
        is_ordered = are_all(int | float, (left, right)) or are_all(str, (left, right))
        return compare(left, right) if is_ordered else NotImplemented

    return safe


COMPARISONS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: _equal,
    ast.NotEq: _not(_equal),
    ast.Lt: _ordered(operator.lt),
    ast.LtE: _ordered(operator.le),
    ast.Gt: _ordered(operator.gt),
    ast.GtE: _ordered(operator.ge),
    ast.Is: _is,
    ast.IsNot: _not(_is),
    ast.In: _contained,
    ast.NotIn: _not(_contained),
}


def path(*parts: Any) -> Any:
    """`os.path.join`, with forward slashes."""
    known = [part for part in parts if part != ""]
    if known and are_all(Texts, known):
        ends = [part.removesuffix("/") if isinstance(part, str) else part for part in known[:-1]]
        return joined("/", [*ends, known[-1]])
    return NotImplemented


def _converted(convert: Callable[[Any], Any]) -> Callable[..., Any]:
    """`int` or `float` of a known number or a string."""

    def safe(*arguments: Any) -> Any:
        if len(arguments) != 1 or not isinstance(arguments[0], bool | int | float | str):
            return NotImplemented
        try:
            return convert(arguments[0])
        except (TypeError, ValueError, OverflowError):
            return NotImplemented

    return safe


def _chosen(choose: Callable[..., Any]) -> Callable[..., Any]:
    """`max` or `min`, of numbers."""

    def safe(*arguments: Any) -> Any:
        return choose(arguments) if arguments and are_all(int | float, arguments) else NotImplemented

    return safe


def _boolean(*arguments: Any) -> Any:
    value = truth(arguments[0]) if len(arguments) == 1 else None
    return NotImplemented if value is None else value


def _range(*arguments: Any) -> Any:
    if not all(isinstance(argument, int) and abs(argument) < LARGEST for argument in arguments):
        return NotImplemented
    try:
        numbers = range(*arguments)
    except (TypeError, ValueError):
        return NotImplemented
    return list(numbers) if len(numbers) <= LONGEST_TEXT else NotImplemented


def _enumerated(*arguments: Any) -> Any:
    return list(enumerate(arguments[0])) if len(arguments) == 1 and _is_list(arguments[0]) else NotImplemented


def _zipped(*arguments: Any) -> Any:
    return list(zip(*arguments, strict=False)) if arguments and all(map(_is_list, arguments)) else NotImplemented


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and whole(value)


def _length(*arguments: Any) -> Any:
    return (
        len(arguments[0])
        if len(arguments) == 1 and (isinstance(arguments[0], str) or whole(arguments[0]))
        else (NotImplemented)
    )


FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "int": _converted(int),
    "float": _converted(float),
    "bool": _boolean,
    "range": _range,
    "enumerate": _enumerated,
    "zip": _zipped,
    "str": lambda *arguments: as_text(arguments[0]) if len(arguments) == 1 else NotImplemented,
    "Path": path,
    "os.path.join": path,
    "max": _chosen(max),
    "min": _chosen(min),
    "len": _length,
    "list": lambda *arguments: list(*arguments) if are_all(list | tuple, arguments) else NotImplemented,
    "tuple": lambda *arguments: tuple(*arguments) if are_all(list | tuple, arguments) else NotImplemented,
}


def _of_text(method: str) -> Callable[..., Any]:
    def safe(owner: Any, *arguments: Any) -> Any:
        if are_all(str, (owner, *arguments)):
            try:
                return getattr(owner, method)(*arguments)
            except (TypeError, ValueError):
                return NotImplemented
        return NotImplemented

    return safe


def _get(owner: Any, *arguments: Any) -> Any:
    if not isinstance(owner, dict) or not arguments or not isinstance(arguments[0], str | int):
        return NotImplemented
    if arguments[0] in owner:
        return owner[arguments[0]]
    return (arguments[1] if len(arguments) > 1 else None) if whole(owner) else NotImplemented


def _of_dictionary(choose: Callable[[dict[Any, Any]], Any]) -> Callable[..., Any]:
    def safe(owner: Any) -> Any:
        return list(choose(owner)) if isinstance(owner, dict) and whole(owner) else NotImplemented

    return safe


def _joined(owner: Any, *arguments: Any) -> Any:
    is_known_list = len(arguments) == 1 and _is_list(arguments[0]) and isinstance(owner, str)
    if not is_known_list or not are_all(str, arguments[0]):
        return NotImplemented
    return joined("", [sign for item in arguments[0] for sign in (owner, item)][1:])


_OF_TEXT: Final = (
    "lower", "upper", "strip", "lstrip", "rstrip", "split", "startswith", "endswith", "removesuffix", "removeprefix",
)  # fmt: skip
METHODS: Final[Mapping[str, Callable[..., Any]]] = {
    **{name: _of_text(name) for name in _OF_TEXT},
    "join": _joined,
    "get": _get,
    "items": _of_dictionary(dict.items),
    "values": _of_dictionary(dict.values),
    "keys": _of_dictionary(dict.keys),
}
"""Methods that change nothing."""
