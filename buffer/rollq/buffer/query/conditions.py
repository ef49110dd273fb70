"""Conditions on groups and on their samples. Pure."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollq.buffer.query.records import GroupRecord
from rollq.buffer.query.texts import GroupTexts
from rollq.buffer.rules.shards import task_of
from rollq.buffer.wire.sample_outcomes import SampleOutcome

IN_TEXTS: Final = frozenset({"prompt", "text"})
"""Fields of `GroupTexts`; their only operator is $contains."""
ORDERED: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}


_EQUALITY: Final[Mapping[str, Callable[[frozenset[Any], Any], bool]]] = {
    "$eq": lambda equals, value: value in equals,
    "$ne": lambda equals, value: value not in equals,
    "$in": lambda equals, values: not equals.isdisjoint(values),
    "$not_in": lambda equals, values: equals.isdisjoint(values),
}


@dataclass(frozen=True, slots=True)
class Field:
    """Compares `field` with `value` (a tuple for $in, $not_in and $between) by one operator."""

    field: str
    operator: str
    value: Any

    def holds(self, record: GroupRecord, texts: GroupTexts | None = None) -> bool:
        """Whether the group's field matches. Without `texts`, conditions on texts count as matched."""
        if self.field not in IN_TEXTS:
            return self.matches(getattr(record, self.field))
        return texts is None or self.matches(getattr(texts, self.field))

    @property
    def searches_texts(self) -> bool:
        return self.field in IN_TEXTS

    def matches(self, found: Any) -> bool:
        """Whether the operator accepts the field's value, or any of its values if there are several."""
        if self.operator in _EQUALITY:
            return _EQUALITY[self.operator](_equals(self.field, found), self.value)
        if self.operator == "$contains":
            return self.value.casefold() in found.casefold()
        if found is None:  # a group without a reward is neither above nor below anything
            return False
        if self.operator == "$between":
            return bool(self.value[0] <= found <= self.value[1])
        return ORDERED[self.operator](found, self.value)


def _equals(field: str, found: Any) -> frozenset[Any]:
    """The values that a field equals. A shard equals its task, too."""
    if isinstance(found, frozenset):
        return found
    return frozenset((found, task_of(found))) if field == "task" else frozenset((found,))


@dataclass(frozen=True, slots=True)
class OneSample:
    """All parts hold for the same sample."""

    parts: tuple[Field, ...]

    def holds(self, record: GroupRecord, texts: GroupTexts | None = None) -> bool:
        return any(map(self.accepts, record.samples))

    @property
    def searches_texts(self) -> bool:
        return False

    def accepts(self, sample: SampleOutcome) -> bool:
        """Whether a sample matches."""
        return all(part.matches(getattr(sample, part.field)) for part in self.parts)


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every part holds; true without parts."""

    parts: tuple["Condition", ...]

    def holds(self, record: GroupRecord, texts: GroupTexts | None = None) -> bool:
        return all(part.holds(record, texts) for part in self.parts)

    @property
    def searches_texts(self) -> bool:
        return any(part.searches_texts for part in self.parts)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one part holds; false without parts."""

    parts: tuple["Condition", ...]

    def holds(self, record: GroupRecord, texts: GroupTexts | None = None) -> bool:
        return any(part.holds(record, texts) for part in self.parts)

    @property
    def searches_texts(self) -> bool:
        return any(part.searches_texts for part in self.parts)


Condition = Field | OneSample | AllOf | AnyOf


def wanted_samples(condition: Condition, samples: Sequence[SampleOutcome]) -> list[SampleOutcome] | None:
    """The samples that match a condition on single samples; None without such a condition."""
    wanted = _of_samples(condition)
    return [sample for sample in samples if any(one.accepts(sample) for one in wanted)] if wanted else None


def _of_samples(condition: Condition) -> list[OneSample]:
    match condition:
        case OneSample():
            return [condition]
        case AllOf(parts) | AnyOf(parts):
            return [one for part in parts for one in _of_samples(part)]
    return []
