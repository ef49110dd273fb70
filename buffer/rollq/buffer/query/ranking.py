"""The order of groups in lists: by a number of the group, or of the samples in it that are wanted. Pure."""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

from rollq.buffer.errors import QueryError
from rollq.buffer.query.conditions import Condition, wanted_samples
from rollq.buffer.query.records import GroupRecord
from rollq.buffer.wire.sample_outcomes import SampleOutcome, longest, rewards_of

MOST_SORTED = 10_000
"""Most groups that are sorted: the first ones, if there are more."""
LIST_SORTS = ("reward", "tokens", "step", "at", "tries")
QUERY_SORTS = ("reward", "min_reward", "max_reward", "tokens", "tries", "staleness", "arrival")
_ATTRIBUTES = {"at": "at_ms", "step": "listed_step"}
_OF_REWARDS: dict[str, Callable[[list[float]], float]] = {
    "reward": lambda rewards: sum(rewards) / len(rewards),
    "min_reward": min,
    "max_reward": max,
}


@dataclass(frozen=True, slots=True)
class Sort:
    """An order of groups by `field`; those without such a number come last."""

    field: str
    descending: bool = False

    @classmethod
    def parse(cls, text: str, known: Sequence[str]) -> Self:
        """The order `[-]field`, descending with the sign. Raises `QueryError` for a field that is not `known`."""
        field = text.removeprefix("-")
        if field not in known:
            raise QueryError(
                f"sort by {field!r}: must be one of {', '.join(known)}, with - before it for the highest first"
            )
        return cls(field, text.startswith("-"))

    def place(self, group: Any, wanted: Sequence[SampleOutcome] | None) -> float:
        """Where a group comes. `wanted`: the samples that a condition on single ones accepts; None without one."""
        value = self._value(group, wanted)
        if value is None:
            return math.inf
        return -value if self.descending else value

    def sample_place(self, sample: SampleOutcome) -> float:
        """Where a sample comes among the others of its group; by another field, all are equal."""
        value = sample.tokens if self.field == "tokens" else sample.reward if self.field in _OF_REWARDS else 0
        if value is None:
            return math.inf
        return -value if self.descending else value

    def _value(self, group: Any, wanted: Sequence[SampleOutcome] | None) -> float | None:
        if wanted is not None and self.field == "tokens":
            return longest(wanted)
        if wanted is not None and self.field in _OF_REWARDS:
            rewards = rewards_of(wanted)
            return _OF_REWARDS[self.field](rewards) if rewards else None
        value: float | None = getattr(group, _ATTRIBUTES.get(self.field, self.field))
        return value


def without_repeats(records: Iterable[GroupRecord]) -> Iterator[GroupRecord]:
    """The records, with only the first of each group."""
    seen = set[tuple[str, int]]()
    for record in records:
        if (name := (record.task, record.uid)) not in seen:
            seen.add(name)
            yield record


def first_records(
    records: Iterable[GroupRecord], condition: Condition, sort: Sort | None, limit: int | None
) -> list[GroupRecord]:
    """The first `limit` groups that match a condition, all for None, in the order of `sort`, or as they come.

    At most `limit` are held at a time.
    """
    if sort is None:
        return list(islice(records, limit))

    def place(record: GroupRecord) -> float:
        return sort.place(record, wanted_samples(condition, record.samples))

    return sorted(records, key=place) if limit is None else heapq.nsmallest(limit, records, key=place)
