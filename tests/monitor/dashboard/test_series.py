"""The history as columns for charts: bounded, of equal length, with the rates that the status shows."""

from rollq.buffer.values.history import HistoryRow
from rollq.buffer.values.rollouts import Status
from rollq.monitor.dashboard.series import MOST_POINTS, series
from rollq.monitor.status.rates import rates


def rows(count: int) -> list[HistoryRow]:
    return [
        HistoryRow(
            at_ms=10_000 * row, step=row, version=row - 1, ready=3, statuses={Status.PENDING: row, Status.FAILED: 0},
            counters={"tokens": 50.0 * row * row, "reward_sum": 2.0 * row, "reward_count": 4.0 * row, "produced": row},
        )
        for row in range(count)
    ]  # fmt: skip


def test_a_point_has_the_rates_of_the_minute_before_it() -> None:
    history = rows(20)
    found = series(history)
    expected = rates(history[:-1], history[-1])
    assert expected is not None
    assert found["tokens"][-1] == expected.tokens
    assert found["tokens"][0] is None
    assert found["reward"][1:] == [0.5] * 19
    assert found["statuses"] == {"pending": list(range(20))}


def test_a_day_is_as_long_as_an_hour_and_ends_with_the_newest_row() -> None:
    for count in (0, 1, 359, 361, 8640):
        found = series(rows(count))
        points = len(found["at_ms"])
        assert points <= MOST_POINTS
        assert points >= min(count, MOST_POINTS // 2)
        assert {len(found[name]) for name in ("ready", "tokens", "reward", "version", "waited_s")} == {points}
        if count:
            assert found["at_ms"][-1] == 10_000 * (count - 1)
