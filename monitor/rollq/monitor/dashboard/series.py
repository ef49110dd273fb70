"""A task's history as numbers for charts. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rollq.buffer.values.history import HISTORY_ROW_MS, HistoryRow
from rollq.monitor.status.rates import WINDOW_MS, rates

MOST_POINTS = 360
RATES = ("groups", "failed", "tokens", "trained", "queued_s", "worked_s", "waited_s", "staleness")
WINDOW_ROWS = WINDOW_MS // HISTORY_ROW_MS + 1


def _depths(rows: Sequence[HistoryRow]) -> dict[str, list[int]]:
    """Groups by status, for each status that has had groups."""
    return {
        status.value: [row.statuses[status] for row in rows]
        for status in (rows[0].statuses if rows else ())
        if any(row.statuses.get(status) for row in rows)
    }


def series(rows: Sequence[HistoryRow]) -> dict[str, Any]:
    """Columns of equal length, at most `MOST_POINTS` each: `at_ms`, depths by status, `ready`, and the `RATES` over the
    minute before each point. `reward` is the mean over samples put since the previous point, None without samples.
    """
    every = max(1, -(-len(rows) // MOST_POINTS))
    at = list(range(len(rows) - 1, -1, -every))[::-1]
    picked = [rows[i] for i in at]
    by_point = [rates(rows[max(0, i - WINDOW_ROWS) : i], rows[i]) for i in at]
    return {
        **_columns(picked, ("at_ms", "ready", "version", "step")),
        "statuses": _depths(picked),
        **_columns(by_point, RATES),
        "reward": [None] * bool(picked) + [_reward(before, after) for before, after in pairwise(picked)],
    }


def _columns(items: Sequence[Any], names: Sequence[str]) -> dict[str, list[Any]]:
    """The attributes `names` of items, None for an item of None."""
    return {name: [getattr(item, name, None) for item in items] for name in names}


def _reward(before: HistoryRow, after: HistoryRow) -> float | None:
    samples = after.counters.get("reward_count", 0) - before.counters.get("reward_count", 0)
    rewards = after.counters.get("reward_sum", 0) - before.counters.get("reward_sum", 0)
    return rewards / samples if samples > 0 else None
