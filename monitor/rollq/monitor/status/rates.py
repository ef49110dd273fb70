"""A task's rates and times over the last minute, from its history. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollq.buffer.values.history import HISTORY_ROW_MS, HistoryRow
from rollq.buffer.values.rollouts import Status

WINDOW_MS = 60_000 + HISTORY_ROW_MS // 2
"""How old the first row can be: a minute plus half of the time between two rows."""
LEAST_MS = 2_000
"""Rates over less time are meaningless."""


@dataclass(frozen=True, slots=True)
class Rates:
    """A task's rates, per second, over its last `seconds`, at most about a minute.

    `groups` counts attempts that workers have put, and `tokens` counts their new tokens. `trained`, `failed`,
    `filtered` and `expired` count groups. Groups' mean times are in seconds: `queued_s` from admission to the first
    lease, `worked_s` with a worker, for generation and judging, and `waited_s` until the trainer takes the group; a
    time is None while no group reaches its end. `waited_s` is computed by Little's law: the mean number of waiting
    groups, divided by the rate at which they leave. `staleness` is the oldest token's staleness, in train steps,
    averaged over trained groups.
    """

    seconds: float
    groups: float
    tokens: float
    trained: float
    failed: float
    filtered: float
    expired: float
    queued_s: float | None
    worked_s: float | None
    waited_s: float | None
    staleness: float | None


def rates(history: Sequence[HistoryRow], now: HistoryRow) -> Rates | None:
    """The rates between the first row of the last minute and `now`; None without such a row."""
    rows = [row for row in history if LEAST_MS <= now.at_ms - row.at_ms <= WINDOW_MS]
    if not rows:
        return None
    rows.append(now)
    seconds = (now.at_ms - rows[0].at_ms) / 1000

    def per_s(counter: str) -> float:
        before, after = rows[0].counters.get(counter, 0), now.counters.get(counter, 0)
        return max(0.0, after - before) / seconds  # a rewind reduces the number of trained groups

    def mean_s(summed_ms: str, counter: str) -> float | None:
        return per_s(summed_ms) / per_s(counter) / 1000 if per_s(counter) else None

    trained = per_s("consumed")
    return Rates(
        seconds=seconds,
        groups=per_s("produced"),
        tokens=per_s("tokens"),
        trained=trained,
        failed=per_s("failed"),
        filtered=per_s("filtered"),
        expired=per_s("expired"),
        queued_s=mean_s("queued_ms", "leased"),
        worked_s=mean_s("worked_ms", "produced"),
        waited_s=_mean_depth(rows, Status.COMPLETED) / trained if trained else None,
        staleness=per_s("staleness") / trained if trained else None,
    )


def _mean_depth(rows: Sequence[HistoryRow], status: Status) -> float:
    """The mean number of groups with a status, each row weighted by the time to the next."""
    sums = [
        ((after.at_ms - before.at_ms), (before.statuses.get(status, 0) + after.statuses.get(status, 0)) / 2)
        for before, after in pairwise(rows)
    ]
    return sum(ms * depth for ms, depth in sums) / max(1, sum(ms for ms, _ in sums))
