"""The query language: conditions on groups, as JSON. Pure: nothing here reads a server.

`{"status": "completed", "staleness": {"$gte": 1}}`: a field with a value must equal it, a field with operators must
satisfy them all, and several fields must all hold. `{}` holds for every group.

operators of a field   $eq $ne $gt $gte $lt $lte, $in $not_in (a list), $between ([low, high], both included)
operators of queries   $and $or (a list of queries; an empty $and holds for all, an empty $or for none)
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rollq.buffer.errors import ConfigError
from rollq.buffer.schema import Status


class QueryError(ConfigError):
    """A query that cannot be understood. Also a `ValueError`."""


@dataclass(frozen=True, slots=True)
class Record:
    """One group, as queries see it.

    `uid`: its number within the task; `arrival`: its place in the order of arrival; `staleness` at the step that is
    trained next, 0 without tokens; `reward`: mean over its samples, None before they are judged.
    """

    uid: int
    task: str
    status: str
    staleness: int
    arrival: int
    reward: float | None
    tries: int


FIELDS: Final[Mapping[str, type]] = {
    "uid": int,
    "task": str,
    "status": str,
    "staleness": int,
    "arrival": int,
    "reward": float,
    "tries": int,
}
"""Field -> type of its values; a whole number is a number too."""

_ORDERED: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
_OPERATORS: Final = ("$eq", "$ne", *_ORDERED, "$in", "$not_in", "$between")


class Condition(Protocol):
    """A question to one group."""

    def holds(self, record: Record) -> bool: ...

    def statuses(self) -> frozenset[Status]:
        """The statuses that a group must be in for the condition to hold; a superset is allowed."""
        ...

    def tasks(self, known: frozenset[str]) -> frozenset[str]:
        """Those of the tasks `known` whose groups may hold; a superset is allowed."""
        ...


@dataclass(frozen=True, slots=True)
class Field:
    """`field` compared by one operator with `value` (a tuple for $in, $not_in and $between)."""

    field: str
    operator: str
    value: Any

    def holds(self, record: Record) -> bool:
        return self._matches(getattr(record, self.field))

    def statuses(self) -> frozenset[Status]:
        if self.field != "status":
            return frozenset(Status)
        return frozenset(status for status in Status if self._matches(status.value))

    def tasks(self, known: frozenset[str]) -> frozenset[str]:
        return frozenset(task for task in known if self._matches(task)) if self.field == "task" else known

    def _matches(self, found: Any) -> bool:
        match self.operator:
            case "$eq":
                return bool(found == self.value)
            case "$ne":
                return bool(found != self.value)
            case "$in":
                return found in self.value
            case "$not_in":
                return found not in self.value
        if found is None:  # a group without a reward is neither above nor below anything
            return False
        if self.operator == "$between":
            return bool(self.value[0] <= found <= self.value[1])
        return _ORDERED[self.operator](found, self.value)


@dataclass(frozen=True, slots=True)
class All:
    """Every part holds; of no parts, too."""

    parts: tuple[Condition, ...]

    def holds(self, record: Record) -> bool:
        return all(part.holds(record) for part in self.parts)

    def statuses(self) -> frozenset[Status]:
        return frozenset(Status).intersection(*(part.statuses() for part in self.parts))

    def tasks(self, known: frozenset[str]) -> frozenset[str]:
        return known.intersection(*(part.tasks(known) for part in self.parts))


@dataclass(frozen=True, slots=True)
class Any_:
    """At least one part holds; of no parts, never."""

    parts: tuple[Condition, ...]

    def holds(self, record: Record) -> bool:
        return any(part.holds(record) for part in self.parts)

    def statuses(self) -> frozenset[Status]:
        return frozenset[Status]().union(*(part.statuses() for part in self.parts))

    def tasks(self, known: frozenset[str]) -> frozenset[str]:
        return frozenset[str]().union(*(part.tasks(known) for part in self.parts))


def parse_query(query: Any) -> Condition:
    """The condition that `query`, made of JSON's values, stands for. Raises `QueryError` naming what is wrong."""
    if not isinstance(query, Mapping):
        raise QueryError(f'query {query!r}: an object is needed, such as {{"status": "completed"}}')
    return All(tuple(part for key, value in query.items() for part in _parts(key, value)))


def _parts(key: str, value: Any) -> Sequence[Condition]:
    if key in ("$and", "$or"):
        if not isinstance(value, list):
            raise QueryError(f"{key}: a list of queries is needed, not {value!r}")
        parts = tuple(parse_query(part) for part in value)
        return [All(parts) if key == "$and" else Any_(parts)]
    if key.startswith("$"):
        raise QueryError(f"unknown operator {key!r}: between queries there are $and and $or")
    if key not in FIELDS:
        raise QueryError(f"unknown field {key!r}: there are {', '.join(FIELDS)}")
    if not isinstance(value, Mapping):
        return [_field(key, "$eq", value)]
    if not value:
        raise QueryError(f'{key}: operators are needed, such as {{"$gte": 1}}, or a value')
    return [_field(key, name, operand) for name, operand in value.items()]


def _field(field: str, name: str, operand: Any) -> Field:
    where = f"{field} {name}"
    match name:
        case "$in" | "$not_in":
            if not isinstance(operand, list):
                raise QueryError(f"{where}: a list is needed, not {operand!r}")
            return Field(field, name, tuple(_value(field, where, item) for item in operand))
        case "$between":
            if not isinstance(operand, list) or len(operand) != 2:
                raise QueryError(f"{where}: two bounds are needed, [low, high], not {operand!r}")
            low, high = (_value(field, where, bound, ordered=True) for bound in operand)
            if low > high:
                raise QueryError(f"{where}: the lower bound comes first, not {operand!r}")
            return Field(field, name, (low, high))
        case "$eq" | "$ne":
            return Field(field, name, _value(field, where, operand))
    if name not in _ORDERED:
        raise QueryError(f"unknown operator {name!r} of field {field!r}: there are {', '.join(_OPERATORS)}")
    return Field(field, name, _value(field, where, operand, ordered=True))


def _value(field: str, where: str, operand: Any, *, ordered: bool = False) -> Any:
    kind = FIELDS[field]
    if operand is None and field == "reward" and not ordered:
        return None  # not judged
    fits = (
        isinstance(operand, str) if kind is str else isinstance(operand, int | float) and not isinstance(operand, bool)
    )
    if not fits:
        raise QueryError(f"{where}: a {'text' if kind is str else 'number'} is needed, not {operand!r}")
    if field == "status" and operand not in {status.value for status in Status}:
        raise QueryError(f"{where}: unknown status {operand!r}: there are {', '.join(Status)}")
    return operand
