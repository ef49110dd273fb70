"""The query language: conditions on groups, as JSON. Pure: nothing here reads a server.

`{"status": "completed", "staleness": {"$gte": 1}}`: a field with a value must equal the value, a field with operators
must satisfy all of them, and several fields must all hold. `{}` holds for every group.

`{"sample": {"reward": 0, "tokens": {"$gt": 100}}}` holds for a group if one of its samples meets every condition.

field operators        $eq $ne $gt $gte $lt $lte, $in $not_in (a list), $between ([low, high], both included)
... of `error`         $contains (a text, in upper or lower case); `prompt` and `text` have only $contains
query operators        $and $or (a list of queries; an empty $and holds for all, an empty $or for none)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rollq.buffer.common.mappings import without
from rollq.buffer.errors import QueryError
from rollq.buffer.query.conditions import IN_TEXTS, ORDERED, AllOf, AnyOf, Condition, Field, OneSample
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import FinishReason, Status

MAX_DEPTH = 32
"""A query's deepest nesting."""
MOST_NUMBER = 1e300
"""Numbers beyond this, and NaN, are refused."""

FIELDS: Final[Mapping[str, type]] = {
    "uid": int,
    "task": str,
    "status": str,
    "staleness": int,
    "arrival": int,
    "reward": float,
    "min_reward": float,
    "max_reward": float,
    "tokens": int,
    "finish_reason": str,
    "tries": int,
    "error": str,
    "failure": str,
    "step": int,
    "prompt": str,
    "text": str,
}
"""Field -> type of its values; float fields accept whole numbers too."""
SAMPLE = "sample"
SAMPLE_FIELDS: Final = ("reward", "tokens", "finish_reason", "error", "failure")
"""The fields of one sample, with the types in `FIELDS`."""

_COMBINED: Final[Mapping[str, Callable[[tuple[Condition, ...]], Condition]]] = {"$and": AllOf, "$or": AnyOf}
_EQUAL: Final = ("$eq", "$ne", "$in", "$not_in")
_OPERATORS: Final = ("$eq", "$ne", *ORDERED, "$in", "$not_in", "$between")
_SEARCHED: Final = frozenset({"error", *IN_TEXTS})
"""Fields with free text, which have the operator $contains."""
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "status": tuple(Status),
    "finish_reason": tuple(FinishReason),
    "failure": tuple(FailureKind),
}
_SEVERAL: Final = frozenset({"finish_reason", "failure"})
"""Fields with a value for each sample, which have no order."""
_MAY_BE_NONE: Final = frozenset({"reward", "min_reward", "max_reward", "tokens", "step"})


def parse_query(query: Any) -> Condition:
    """Parse a query, made of JSON values, into a condition. Raises `QueryError` naming the invalid part."""
    return _parse(query, 1)


def _parse(query: Any, depth: int) -> AllOf:
    if not isinstance(query, Mapping):
        raise QueryError(f'query {query!r}: must be an object, such as {{"status": "completed"}}')
    if depth > MAX_DEPTH:
        raise QueryError(f"the query is nested more than {MAX_DEPTH} levels deep: write a flatter query")
    return AllOf(tuple(part for key, value in query.items() for part in _parts(key, value, depth)))


def _parts(key: Any, value: Any, depth: int) -> Sequence[Condition]:
    if key in _COMBINED:
        if not isinstance(value, list):
            raise QueryError(f"{key}: must be a list of queries, not {value!r}")
        return [_COMBINED[key](tuple(_parse(part, depth + 1) for part in value))]
    if key == SAMPLE:
        return [parse_sample(value)]
    if key not in FIELDS:
        if str(key).startswith("$"):
            raise QueryError(f"unknown operator {key!r}: queries are combined by $and and $or")
        raise QueryError(f"unknown field {key!r}: the fields are {', '.join((*FIELDS, SAMPLE))}")
    return _fields(key, value)


def parse_sample(value: Any) -> OneSample:
    """Parse the conditions on one sample. Raises `QueryError`."""
    if not isinstance(value, Mapping) or not value:
        raise QueryError(f'{SAMPLE}: must be conditions on one sample, such as {{"reward": 0}}, not {value!r}')
    if unknown := list(without(value, SAMPLE_FIELDS)):
        raise QueryError(f"{SAMPLE}: unknown field {unknown[0]!r}: the fields are {', '.join(SAMPLE_FIELDS)}")
    return OneSample(tuple(part for key, given in value.items() for part in _fields(key, given)))


def _fields(key: str, value: Any) -> list[Field]:
    if not isinstance(value, Mapping):
        return [_field(key, "$eq", value)]
    if not value:
        raise QueryError(f'{key}: must be a value, or operators such as {{"$gte": 1}}')
    return [_field(key, name, operand) for name, operand in value.items()]


def _field(field: str, name: str, operand: Any) -> Field:
    if field in IN_TEXTS and name != "$contains":
        raise QueryError(f'{field}: only $contains searches it, such as {{"{field}": {{"$contains": "a word"}}}}')
    known = _EQUAL if field in _SEVERAL else (*_OPERATORS, "$contains") if field in _SEARCHED else _OPERATORS
    if name not in known:
        raise QueryError(f"unknown operator {name!r} of field {field!r}: the operators are {', '.join(known)}")
    return Field(field, name, _OPERANDS.get(name, _ordered_value)(field, f"{field} {name}", operand))


def _values(field: str, where: str, operand: Any) -> tuple[Any, ...]:
    if not isinstance(operand, list):
        raise QueryError(f"{where}: must be a list, not {operand!r}")
    return tuple(_value(field, where, item) for item in operand)


def _bounds(field: str, where: str, operand: Any) -> tuple[Any, Any]:
    if not isinstance(operand, list) or len(operand) != 2:
        raise QueryError(f"{where}: must be two bounds, [low, high], not {operand!r}")
    low, high = (_ordered_value(field, where, bound) for bound in operand)
    if low > high:
        raise QueryError(f"{where}: the lower bound comes first, not {operand!r}")
    return low, high


def _value(field: str, where: str, operand: Any) -> Any:
    if operand is None and field in _MAY_BE_NONE:
        return None  # not judged, or in no step
    return _ordered_value(field, where, operand)


def _ordered_value(field: str, where: str, operand: Any) -> Any:
    """Parse a value that can be above or below others; the reward of an unjudged group cannot be."""
    if FIELDS[field] is not str:
        if type(operand) not in (int, float) or not abs(operand) <= MOST_NUMBER:
            raise QueryError(f"{where}: must be a number, not {operand!r:.60}")
        return operand
    if not isinstance(operand, str):
        raise QueryError(f"{where}: must be a string, not {operand!r}")
    if operand not in _CHOICES.get(field, (operand,)):
        raise QueryError(
            f"{where}: unknown {field.replace('_', ' ')} {operand!r}: must be one of {', '.join(_CHOICES[field])}"
        )
    return operand


_OPERANDS: Final[Mapping[str, Callable[[str, str, Any], Any]]] = {
    "$eq": _value, "$ne": _value, "$contains": _value, "$in": _values, "$not_in": _values, "$between": _bounds,
}  # fmt: skip
"""Operator -> the function that parses its operand; ordering operators are not listed."""
