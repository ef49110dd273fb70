"""Rates over the last minute from rows of the history."""

from dataclasses import replace

import pytest

from rollq.buffer.values.history import HistoryRow
from rollq.buffer.values.rollouts import Status
from rollq.monitor.status.rates import rates


def row(at_s: float, completed: int = 0, **counters: float) -> HistoryRow:
    return HistoryRow(int(at_s * 1000), 1, 0, 0, {Status.COMPLETED: completed}, counters)


def test_without_a_history_nothing_is_known() -> None:
    assert rates([], row(100)) is None
    assert rates([row(99)], row(100)) is None
    assert rates([row(10)], row(100)) is None  # nobody has produced for over a minute


def test_rates_are_those_of_the_last_minute() -> None:
    rows = [row(0, tokens=0), row(40, tokens=1_000_000), row(100, tokens=1_000_600)]
    found = rates(rows, row(100.1, tokens=1_000_601))
    assert found is not None
    assert found.seconds == pytest.approx(60.1)
    assert found.tokens == pytest.approx(10)


def test_times_are_means_over_the_groups_of_the_last_minute() -> None:
    before = row(0, leased=10, queued_ms=90_000, produced=5, worked_ms=1_000)
    found = rates([before], row(60, leased=14, queued_ms=98_000, produced=15, worked_ms=31_000))
    assert found is not None
    assert [found.queued_s, found.worked_s] == pytest.approx([2.0, 3.0])
    nothing = rates([before], replace(before, at_ms=60_000))
    assert nothing is not None
    assert (nothing.queued_s, nothing.worked_s, nothing.waited_s) == (None, None, None)


def test_the_wait_for_the_trainer_follows_from_depth_and_rate() -> None:
    rows = [row(0, completed=0, consumed=0), row(50, completed=20, consumed=100)]
    found = rates(rows, row(60, completed=20, consumed=120))
    assert found is not None
    depth = (50 * 10 + 10 * 20) / 60
    assert found.waited_s == pytest.approx(depth / 2.0)


def test_the_staleness_is_the_mean_of_the_trained_groups() -> None:
    found = rates([row(0, consumed=10, staleness=40)], row(60, consumed=30, staleness=70))
    assert found is not None
    assert found.staleness == pytest.approx(1.5)
    nothing = rates([row(0, consumed=10, staleness=40)], row(60, consumed=10, staleness=40))
    assert nothing is not None
    assert nothing.staleness is None


def test_a_rewind_makes_no_negative_rate() -> None:
    found = rates([row(0, consumed=100)], row(60, consumed=40))
    assert found is not None
    assert found.trained == 0
