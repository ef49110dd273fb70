"""Values in another system's settings that are not known before that system runs. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Self

REST: Final = "**"
"""The key, in a mapping, for a value that could set any other key, as in `RolloutConfig(**load())`."""
LONGEST_NUMBER: Final = 2**1024
"""Integers of this size or more are not shown: Python does not convert very long integers to text."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that only the other system could compute, in its written form."""

    text: str


@dataclass(frozen=True, slots=True)
class Several(Unknown):
    """An unknown number of items in a list. `like` is one of the items, if they are alike."""

    like: Any = field(default=None, compare=False)

    @classmethod
    def of(cls, text: str, items: list[Any]) -> Self:
        """An unknown number of items, in place of the example `items`."""
        return cls(text, items[0] if len(items) == 1 else None)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A string with environment variables without a default: their names replace their values."""

    text: str


@dataclass(frozen=True, slots=True)
class Named:
    """The file's function or class, or an object with a dotted name in a library."""

    name: str


@dataclass(frozen=True, slots=True)
class Function(Named):
    """The file's function that can be followed: its syntax, the scopes around it, and its defaults by name."""

    node: Any = field(compare=False)
    scopes: Any = field(compare=False)
    defaults: dict[str, Any] = field(compare=False)


@dataclass(slots=True)
class Made:
    """An object of a settings class: the class's name and the arguments."""

    group: str
    fields: dict[str, Any] = field(default_factory=dict)


def is_known(value: Any) -> bool:
    """Whether a value is known as a whole; its parts may be unknown."""
    return not isinstance(value, Unknown | Placeholder | Named)


def are_all(kind: Any, values: Iterable[Any]) -> bool:
    """Whether all values are instances of `kind`, which `isinstance` takes."""
    return all(isinstance(value, kind) for value in values)


def containers(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The dictionaries, lists and tuples in a value, including the value itself, each once, after the containers inside
    it."""
    seen = set() if seen is None else seen
    value = value.fields if isinstance(value, Made) else value
    if id(value) in seen or not isinstance(value, dict | list | tuple):
        return
    seen.add(id(value))
    for item in list(value.values()) if isinstance(value, dict) else value:
        yield from containers(item, seen)
    yield value


def same(left: Any, right: Any, nodes: int = 10_000) -> bool:
    """Whether two values are equal and of one type. Values of more than `nodes` parts count as different."""
    pairs = [(left, right)]
    while pairs:
        one, other = pairs.pop()
        nodes -= 1
        if one is other:
            continue
        inside = _pairs(one, other) if type(one) is type(other) and nodes > 0 else None
        if inside is None:
            return False
        pairs += inside
    return True


def _pairs(one: Any, other: Any) -> list[tuple[Any, Any]] | None:
    """The pairs of parts that must be equal for two values of one type to be equal, or None if the values differ."""
    if isinstance(one, Made):
        return [(one.group, other.group), (one.fields, other.fields)]
    if isinstance(one, dict):
        return list(zip(one.values(), map(other.get, one), strict=True)) if one.keys() == other.keys() else None
    if isinstance(one, list | tuple):
        return list(zip(one, other, strict=True)) if len(one) == len(other) else None
    return [] if one == other else None


def shown(value: Any, longest: int = 100) -> str:
    """A value on one line, in the form for the new file's comments."""
    text = " ".join("".join(sign if sign.isprintable() else " " for sign in _text(value, longest + 1)).split())
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _text(value: Any, room: int) -> str:
    """The start of a value's text: all of it, or at least `room` characters."""
    if isinstance(value, Unknown | Placeholder):
        return value.text[: 2 * room]
    if isinstance(value, Named):
        return value.name[: 2 * room]
    if isinstance(value, Made):
        return f"{value.group[:room]}(...)"
    return _items(value, room) if isinstance(value, dict | list | tuple) else _scalar(value, room)


def _scalar(value: Any, room: int) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= LONGEST_NUMBER:
        return "a very long number"
    return repr(value[: 2 * room] if isinstance(value, str | bytes) else value)


def _items(value: Any, room: int) -> str:
    is_table = isinstance(value, dict)
    text, end = "{}" if is_table else "[]"
    for place, item in enumerate(value):
        if len(text) >= room:
            break
        text += ", " if place else ""
        text += _head(item) if is_table else ""
        text += _text(value[item] if is_table else item, room - len(text))
    return text + end


def _head(key: Any) -> str:
    return f"{key if isinstance(key, str) else _text(key, 20)}: "
