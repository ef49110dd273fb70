"""A task's history: a row of depths and counters every 10 seconds, for the last day. Plain values.

`reap`, which every producer calls about once a second, writes the rows. The history is a view of this store, not a part
of the run: snapshots leave it out, and a restored run begins a new history.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rollq.buffer.values.places import Place
from rollq.buffer.values.rollouts import Status

HISTORY_ROW_MS = 10_000
HISTORY_ROWS = 8_640
"""The number of kept rows: a day's."""
HISTORY_COUNTERS = (
    "admitted", "consumed", "produced", "tokens", "reward_sum", "reward_count", "expired", "filtered", "failed",
    "requeued", "leased", "queued_ms", "worked_ms", "staleness",
)  # fmt: skip
"""The cumulative task counters that a row has."""
MOST_ROW_BYTES = 360
"""The most bytes that a row takes in the store: 4 numbers, each status's depth, and the counters."""


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """A task at `at_ms` by the server's clock: it had `ready` groups at `step`, and weights `version` were live."""

    at_ms: int
    step: int
    version: int
    ready: int
    statuses: Mapping[Status, int]
    counters: Mapping[str, float]

    @classmethod
    def decode(cls, row: bytes) -> Self:
        """Decode a row that `reap` wrote."""
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
    """The place of a task's producer, and the seconds since the producer looked at the task."""

    place: Place
    silent_s: float


@dataclass(frozen=True, slots=True)
class Overview:
    """Facts that monitors show beside a task's counts.

    `silent_s` is the number of seconds since a producer looked at the task; None if no producer ever has. `rows` holds
    the newest rows of its history. `by_staleness` counts ready groups by the staleness that they would be trained with;
    with the orders `arrival` and `priority`, it counts aborted groups too. The ages, in seconds, count from the
    admission of the pending group that is leased next, from the first lease among groups with the oldest weights, and
    from the put of the ready group with the lowest score; None without such a group. `producers` lists the latest
    first.
    """

    task: str
    silent_s: float | None
    rows: tuple[HistoryRow, ...]
    by_staleness: Mapping[int, int]
    pending_age_s: float | None
    running_age_s: float | None
    ready_age_s: float | None
    producers: tuple[SeenProducer, ...] = ()
