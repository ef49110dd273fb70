"""The history of a task: a row of depths and counters every 10 seconds, of the last day. Plain values.

Rows are written by `reap`, which every producer calls about once a second. The history is a view of this store, not a
part of the run: a snapshot leaves it out, and a restored run begins a new one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rollq.buffer.values.places import Place
from rollq.buffer.values.rollouts import Status

HISTORY_ROW_MS = 10_000
HISTORY_ROWS = 8_640
"""The number of rows that are kept: a day."""
HISTORY_COUNTERS = (
    "admitted", "consumed", "produced", "tokens", "reward_sum", "reward_count", "expired", "filtered", "failed",
    "requeued", "leased", "queued_ms", "worked_ms", "staleness",
)  # fmt: skip
"""The cumulative counters of a task that a row has."""
MOST_ROW_BYTES = 360
"""A row takes at most this much in the store: 4 numbers, a depth of each status, and the counters."""


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """A task at the moment `at_ms` of the server's clock. It had `ready` groups at `step`, and weights `version` were
    live."""

    at_ms: int
    step: int
    version: int
    ready: int
    statuses: Mapping[Status, int]
    counters: Mapping[str, float]

    @classmethod
    def decode(cls, row: bytes) -> Self:
        """The row that `reap` has written."""
        at_ms, step, version, ready, *rest = row.decode().split(",")
        depths, counters = rest[: len(Status)], rest[len(Status) :]
        return cls(
            int(at_ms),
            int(step),
            int(version),
            int(ready),
            dict(zip(Status, map(int, depths), strict=True)),
            dict(zip(HISTORY_COUNTERS, map(float, counters), strict=False)),  # a later release may write more
        )


@dataclass(frozen=True, slots=True)
class SeenProducer:
    """The place of a task's producer, and the seconds since it looked at the task."""

    place: Place
    silent_s: float


@dataclass(frozen=True, slots=True)
class Overview:
    """Facts of a task that monitors show beside its counts.

    `silent_s` is the number of seconds since a producer looked at the task; None if no producer ever has. `rows` are
    the newest rows of its history. `by_staleness` counts ready groups by the staleness that they would be trained with.
    The ages, in seconds, belong to the pending group that is leased next, to the oldest lease among the leases with the
    oldest weights, and to the result of the ready group that is trained next; an age is None without such a group.
    `producers` are listed with the latest first.
    """

    task: str
    silent_s: float | None
    rows: tuple[HistoryRow, ...]
    by_staleness: Mapping[int, int]
    pending_age_s: float | None
    running_age_s: float | None
    ready_age_s: float | None
    producers: tuple[SeenProducer, ...] = ()
