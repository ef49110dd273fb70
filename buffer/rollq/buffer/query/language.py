"""The query language: conditions on groups, as JSON. Pure: nothing here reads a server.

`{"status": "completed", "staleness": {"$gte": 1}}`: a field with a value must equal it, a field with operators must
satisfy them all, and several fields must all hold. `{}` holds for every group.

operators of a field   $eq $ne $gt $gte $lt $lte, $in $not_in (a list), $between ([low, high], both included)
... of `error`         $contains (a text, in upper or lower case); `prompt` and `text` have only that one
operators of queries   $and $or (a list of queries; an empty $and holds for all, an empty $or for none)
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollq.buffer.errors import QueryError
from rollq.buffer.query.texts import GroupTexts
from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.rollouts import Status

MAX_DEPTH = 32
"""How deep queries may be nested."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group, as queries see it.

    `uid`: its number within its task; numbers are given in order of arrival, so that `arrival` is the same number.
    `staleness`: of the oldest token that it still holds, at the step that is trained next; 0 without tokens. For an
    expired group, its staleness when it expired.
    `reward`: mean over its samples when it was last put, None if no finished sample is left. `tries`: its attempts,
    counted from 0 again after an interruption or expiry. `error`: why it failed or was filtered, or the error of an
    earlier try; else "". `step`: the train step that has claimed it, or, while it is pending or running, the step that
    it was admitted for; None in every other status.
    """

    uid: int
    task: str
    status: str
    staleness: int
    arrival: int
    reward: float | None
    tries: int
    error: str = ""
    step: int | None = None


FIELDS: Final[Mapping[str, type]] = {
    "uid": int,
    "task": str,
    "status": str,
    "staleness": int,
    "arrival": int,
    "reward": float,
    "tries": int,
    "error": str,
    "step": int,
    "prompt": str,
    "text": str,
}
"""Field -> type of its values; a whole number is a number too."""

_ORDERED: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
_OPERATORS: Final = ("$eq", "$ne", *_ORDERED, "$in", "$not_in", "$between")
_IN_TEXTS: Final = frozenset({"prompt", "text"})
"""Fields of `GroupTexts`, whose only operator is $contains."""
_SEARCHED: Final = frozenset({"error", *_IN_TEXTS})
"""Fields with free text, which have the operator $contains."""
_MAY_BE_NONE: Final = frozenset({"reward", "step"})


@dataclass(frozen=True, slots=True)
class Field:
    """`field` compared by one operator with `value` (a tuple for $in, $not_in and $between)."""

    field: str
    operator: str
    value: Any

    def holds(self, record: GroupRecord, texts: GroupTexts | None = None) -> bool:
        """Whether the field of the group is as wanted. Without `texts`, what is wanted of these counts as found."""
        if self.field not in _IN_TEXTS:
            return self.matches(getattr(record, self.field))
        return texts is None or self.matches(getattr(texts, self.field))

    @property
    def searches_texts(self) -> bool:
        return self.field in _IN_TEXTS

    def matches(self, found: Any) -> bool:
        """Whether the operator accepts this value of the field. A shard is equal to its task, too."""
        equals = {found, task_of(found)} if self.field == "task" else {found}
        match self.operator:
            case "$eq":
                return self.value in equals
            case "$ne":
                return self.value not in equals
            case "$in":
                return not equals.isdisjoint(self.value)
            case "$not_in":
                return equals.isdisjoint(self.value)
            case "$contains":
                return self.value.casefold() in found.casefold()
        if found is None:  # a group without a reward is neither above nor below anything
            return False
        if self.operator == "$between":
            return bool(self.value[0] <= found <= self.value[1])
        return _ORDERED[self.operator](found, self.value)


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every part holds; of no parts, too."""

    parts: tuple["Condition", ...]

    def holds(self, record: GroupRecord, texts: GroupTexts | None = None) -> bool:
        return all(part.holds(record, texts) for part in self.parts)

    @property
    def searches_texts(self) -> bool:
        return any(part.searches_texts for part in self.parts)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one part holds; of no parts, never."""

    parts: tuple["Condition", ...]

    def holds(self, record: GroupRecord, texts: GroupTexts | None = None) -> bool:
        return any(part.holds(record, texts) for part in self.parts)

    @property
    def searches_texts(self) -> bool:
        return any(part.searches_texts for part in self.parts)


Condition = Field | AllOf | AnyOf


def parse_query(query: Any) -> Condition:
    """Parse a query, made of JSON values, into a condition. Raises `QueryError` naming the part that is invalid."""
    return _parse(query, 1)


def _parse(query: Any, depth: int) -> AllOf:
    if not isinstance(query, Mapping):
        raise QueryError(f'query {query!r}: an object is needed, such as {{"status": "completed"}}')
    if depth > MAX_DEPTH:
        raise QueryError(f"queries are nested more than {MAX_DEPTH} deep: write a flatter one")
    return AllOf(tuple(part for key, value in query.items() for part in _parts(key, value, depth)))


def _parts(key: Any, value: Any, depth: int) -> Sequence[Condition]:
    if key in ("$and", "$or"):
        if not isinstance(value, list):
            raise QueryError(f"{key}: a list of queries is needed, not {value!r}")
        parts = tuple(_parse(part, depth + 1) for part in value)
        return [AllOf(parts) if key == "$and" else AnyOf(parts)]
    if key not in FIELDS:
        if str(key).startswith("$"):
            raise QueryError(f"unknown operator {key!r}: between queries there are $and and $or")
        raise QueryError(f"unknown field {key!r}: there are {', '.join(FIELDS)}")
    if not isinstance(value, Mapping):
        return [_field(key, "$eq", value)]
    if not value:
        raise QueryError(f'{key}: operators are needed, such as {{"$gte": 1}}, or a value')
    return [_field(key, name, operand) for name, operand in value.items()]


def _field(field: str, name: str, operand: Any) -> Field:
    where = f"{field} {name}"
    if field in _IN_TEXTS and name != "$contains":
        raise QueryError(f'{field}: only $contains searches it, such as {{"{field}": {{"$contains": "a word"}}}}')
    match name:
        case "$in" | "$not_in":
            if not isinstance(operand, list):
                raise QueryError(f"{where}: a list is needed, not {operand!r}")
            return Field(field, name, tuple(_value(field, where, item) for item in operand))
        case "$between":
            return Field(field, name, _bounds(field, where, operand))
        case "$eq" | "$ne":
            return Field(field, name, _value(field, where, operand))
        case "$contains" if field in _SEARCHED:
            return Field(field, name, _value(field, where, operand))
    if name not in _ORDERED:
        operators = (*_OPERATORS, "$contains") if field in _SEARCHED else _OPERATORS
        raise QueryError(f"unknown operator {name!r} of field {field!r}: there are {', '.join(operators)}")
    return Field(field, name, _ordered_value(field, where, operand))


def _bounds(field: str, where: str, operand: Any) -> tuple[Any, Any]:
    if not isinstance(operand, list) or len(operand) != 2:
        raise QueryError(f"{where}: two bounds are needed, [low, high], not {operand!r}")
    low, high = (_ordered_value(field, where, bound) for bound in operand)
    if low > high:
        raise QueryError(f"{where}: the lower bound comes first, not {operand!r}")
    return low, high


def _value(field: str, where: str, operand: Any) -> Any:
    if operand is None and field in _MAY_BE_NONE:
        return None  # not judged, or in no step
    return _ordered_value(field, where, operand)


def _ordered_value(field: str, where: str, operand: Any) -> Any:
    """A value that can be above or below others; the reward of a group that was not judged cannot."""
    if FIELDS[field] is not str:
        if type(operand) not in (int, float) or not math.isfinite(operand):
            raise QueryError(f"{where}: a number is needed, not {operand!r}")
        return operand
    if not isinstance(operand, str):
        raise QueryError(f"{where}: a text is needed, not {operand!r}")
    if field == "status" and operand not in set(Status):
        raise QueryError(f"{where}: unknown status {operand!r}: there are {', '.join(Status)}")
    return operand
