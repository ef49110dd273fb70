"""Orders groups in lists by a number of the group, or of its wanted samples. Pure."""

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
"""The most groups that are sorted; if there are more, only the first are."""
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
    """An order of groups by `field`; groups without such a number come last."""

    field: str
    descending: bool = False

    @classmethod
    def parse(cls, text: str, known: Sequence[str]) -> Self:
        """Parse `[-]field`, where the minus sign means descending order. Raises `QueryError` for a field that is not
        `known`."""
        field = text.removeprefix("-")
        if field not in known:
            raise QueryError(
                f"sort by {field!r}: must be one of {', '.join(known)}, with - before it for the highest first"
            )
        return cls(field, text.startswith("-"))

    def place(self, group: Any, wanted: Sequence[SampleOutcome] | None) -> float:
        """A group's sort key. `wanted` holds the samples that a condition on single samples accepts, None without such
        a condition."""
        value = self._value(group, wanted)
        if value is None:
            return math.inf
        return -value if self.descending else value

    def sample_place(self, sample: SampleOutcome) -> float:
        """A sample's sort key in its group; all keys are equal if the order is by another field."""
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
    """Yield only the first record of each group."""
    seen = set[tuple[str, int]]()
    for record in records:
        if (name := (record.task, record.uid)) not in seen:
            seen.add(name)
            yield record


def first_records(
    records: Iterable[GroupRecord], condition: Condition, sort: Sort | None, limit: int | None
) -> list[GroupRecord]:
    """Return the first `limit` of these groups (None means all of them), in the order of `sort`, or as they arrive.
    With a limit, holds at most `limit` groups at once. `condition` is the query's: a sort counts only samples that
    match its conditions on single samples.
    """
    if sort is None:
        return list(islice(records, limit))

    def place(record: GroupRecord) -> float:
        return sort.place(record, wanted_samples(condition, record.samples))

    return sorted(records, key=place) if limit is None else heapq.nsmallest(limit, records, key=place)
