"""Plans a query: the tasks, statuses and score ranges that may match a condition. Pure.

A plan covers every group that matches the condition, and may cover more: the reader checks the condition again.

status                                 score in its sorted set
completed, aborted                     version that the group counts as, then arrival; arrival with the order
                                       `arrival`; a completed group's priority with the order `priority`
gathered, expired, filtered, failed    arrival
claimed, archived, leaving             step
the others                             step or deadline, which queries do not use
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from rollq.buffer.query.conditions import AllOf, AnyOf, Condition, Field, OneSample
from rollq.buffer.store.scores import ARRIVALS, NO_TOKENS
from rollq.buffer.values.rollouts import Status

BY_VERSION: Final = "by_version"
"""The index of completed and aborted groups by version, for tasks with any order."""

_IN_VERSION_INDEX: Final = frozenset({Status.COMPLETED, Status.ABORTED})
_BY_STEP: Final = frozenset({Status.CLAIMED, Status.ARCHIVED, Status.LEAVING})
_OF_A_STEP: Final = _BY_STEP | {Status.PENDING, Status.RUNNING}
"""The statuses of groups that have a step, as queries see them."""
_BY_ARRIVAL: Final = frozenset({Status.GATHERED, Status.EXPIRED, Status.FILTERED, Status.FAILED})


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `low` to `high`, both included. An infinite bound excludes nothing."""

    low: float = -math.inf
    high: float = math.inf

    @property
    def is_empty(self) -> bool:
        return self.low > self.high

    @property
    def is_bounded(self) -> bool:
        """Whether the range excludes any number."""
        return self != _ALL

    def both(self, other: "Range") -> "Range":
        return Range(max(self.low, other.low), min(self.high, other.high))

    def either(self, other: "Range") -> "Range":
        """The smallest range that covers both."""
        return Range(min(self.low, other.low), max(self.high, other.high))


_ALL: Final = Range()
_NONE: Final = Range(math.inf, -math.inf)


@dataclass(frozen=True, slots=True)
class Reach:
    """The groups in one of these tasks, one of these statuses, and all ranges. Group ids are arrivals."""

    tasks: frozenset[str]
    statuses: frozenset[Status] = frozenset(Status)
    staleness: Range = _ALL
    arrivals: Range = _ALL
    steps: Range = _ALL

    @property
    def is_empty(self) -> bool:
        ranges = (self.staleness, self.arrivals, self.steps)
        return not self.tasks or not self.statuses or any(one.is_empty for one in ranges)

    def both(self, other: "Reach") -> "Reach":
        return Reach(
            self.tasks & other.tasks,
            self.statuses & other.statuses,
            self.staleness.both(other.staleness),
            self.arrivals.both(other.arrivals),
            self.steps.both(other.steps),
        )

    def either(self, other: "Reach") -> "Reach":
        """The smallest reach that covers both."""
        if self.is_empty or other.is_empty:
            return other if self.is_empty else self
        return Reach(
            self.tasks | other.tasks,
            self.statuses | other.statuses,
            self.staleness.either(other.staleness),
            self.arrivals.either(other.arrivals),
            self.steps.either(other.steps),
        )


def reach_of(condition: Condition, tasks: frozenset[str]) -> Reach:
    """The reach of the groups in the run's `tasks` that may match `condition`."""
    match condition:
        case AllOf(parts):
            return reduce(Reach.both, (reach_of(part, tasks) for part in parts), Reach(tasks))
        case AnyOf(parts):
            return reduce(Reach.either, (reach_of(part, tasks) for part in parts), Reach(frozenset()))
        case OneSample():
            return Reach(tasks)
    return _reach_of_field(condition, tasks)


def steps_of(condition: Condition) -> Range:
    """The train steps of groups in any task that match `condition`."""
    match condition:
        case AllOf(parts):
            return reduce(Range.both, map(steps_of, parts), _ALL)
        case AnyOf(parts):
            return reduce(Range.either, map(steps_of, parts), _NONE)
        case Field(field="step"):
            return _range(condition)
    return _ALL


def _reach_of_field(condition: Field, tasks: frozenset[str]) -> Reach:
    match condition.field:
        case "task":
            return Reach(frozenset(filter(condition.matches, tasks)))
        case "status":
            return Reach(tasks, frozenset(status for status in Status if condition.matches(status.value)))
        case "staleness":
            return Reach(tasks, staleness=_range(condition))
        case "uid" | "arrival":
            return Reach(tasks, arrivals=_range(condition))
        case "step":
            steps = _range(condition)
            return Reach(tasks) if steps == _ALL else Reach(tasks, _OF_A_STEP, steps=steps)
        case _:
            return Reach(tasks)


def _range(condition: Field) -> Range:
    """A range that includes all whole numbers that the condition accepts."""
    value = condition.value
    if value is None or (condition.operator == "$in" and None in value):
        return _ALL
    range_of = _RANGES.get(condition.operator)
    return _ALL if range_of is None else range_of(value)


_RANGES: Final[Mapping[str, Callable[[Any], Range]]] = {
    "$eq": lambda value: Range(math.ceil(value), math.floor(value)),
    "$gt": lambda value: Range(low=math.floor(value) + 1),
    "$gte": lambda value: Range(low=math.ceil(value)),
    "$lt": lambda value: Range(high=math.ceil(value) - 1),
    "$lte": lambda value: Range(high=math.floor(value)),
    "$between": lambda value: Range(math.ceil(value[0]), math.floor(value[1])),
    "$in": lambda value: Range(math.ceil(min(value)), math.floor(max(value))) if value else _NONE,
}
"""For each operator, a range with all whole numbers that it accepts. Other operators get the range of all numbers."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The members of one sorted set (a status, or `BY_VERSION`) with scores from `low` (included) to `high`
    (excluded)."""

    index: str
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The reads for one task: group ids that the query names, or else ranges of sorted sets."""

    ids: range = range(0)
    scores: tuple[Scores, ...] = ()


def plan_reads(reach: Reach, *, step: int, order: str, most_ids: int, token_shift: int = 0) -> ReadPlan:
    """Plan the reads for a task with this `order` whose next step is `step`. Up to `most_ids` ids are read without the
    sorted sets.

    `token_shift`, 0 or less, says how far the version that a group counts as may be below its oldest token's version
    (see `counted_version`).
    """
    low = max(1, reach.arrivals.low)
    if reach.arrivals.high - low < most_ids:
        return ReadPlan(ids=range(int(low), int(reach.arrivals.high) + 1))
    scores_read = (
        scores for status in sorted(reach.statuses) for scores in _scores(status, reach, step, order, token_shift)
    )
    return ReadPlan(scores=tuple(dict.fromkeys(scores_read)))


def _sorts_by_version(order: str, status: Status) -> bool:
    """Whether a status in the version index has a set with the same scores; see `lua/common/orders.lua`."""
    return order != "arrival" and (order != "priority" or status is not Status.COMPLETED)


def _scores(status: Status, reach: Reach, step: int, order: str, token_shift: int) -> Iterator[Scores]:
    by_version = status in _IN_VERSION_INDEX and _sorts_by_version(order, status)
    if status in _IN_VERSION_INDEX and reach.staleness != _ALL:
        index = status if by_version else BY_VERSION
        oldest = step - 1 - reach.staleness.high + token_shift
        newest = min(step - 1 - reach.staleness.low, NO_TOKENS - 1)
        yield Scores(index, oldest * ARRIVALS, (newest + 1) * ARRIVALS)
        if reach.staleness.low <= 0 <= reach.staleness.high:
            yield Scores(index, low=NO_TOKENS * ARRIVALS)
    elif status in _BY_ARRIVAL or (status in _IN_VERSION_INDEX and order == "arrival"):
        yield Scores(status, reach.arrivals.low, reach.arrivals.high + 1)
    elif status in _BY_STEP:
        yield Scores(status, reach.steps.low, reach.steps.high + 1)
    else:
        yield Scores(status)
