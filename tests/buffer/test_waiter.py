"""Waiting: wake-ups, the poll, reasons in the log, deadlines. The clock is a number that the wake-ups move."""

import threading
from collections.abc import Callable

import pytest

from rollq.buffer.store.waiter import POLL_S, REPORT_S, Waiter


class Clock:
    """A clock that moves only in pauses. `pauses` are the seconds that each `wait` was allowed to take."""

    def __init__(self, pause_s: float | None = None) -> None:
        self.now_s = 100.0
        self.pauses: list[float] = []
        self._pause_s = pause_s

    def __call__(self) -> float:
        return self.now_s

    def wait(self, timeout_s: float) -> None:
        self.pauses.append(timeout_s)
        self.now_s += timeout_s if self._pause_s is None else min(timeout_s, self._pause_s)


def waiting(clock: Clock, *, timeout_s: float | None = None, explain: Callable[[], str] = lambda: "no batch") -> Waiter:
    return Waiter(clock, explain=explain, timeout_s=timeout_s, now=clock)


def test_the_store_is_checked_at_once_and_after_every_pause() -> None:
    clock = Clock()
    waiter = waiting(clock)
    for check, _ in enumerate(waiter, start=1):
        if check == 4:
            break
    assert clock.pauses == [POLL_S] * 3
    assert waiter.elapsed_s == 3 * POLL_S
    assert not waiter.timed_out


def test_a_wait_without_time_checks_once() -> None:
    clock = Clock()
    waiter = waiting(clock, timeout_s=0)
    assert len(list(waiter)) == 1
    assert waiter.timed_out
    assert clock.pauses == []


def test_the_last_pause_ends_at_the_deadline_and_the_store_is_checked_once_more() -> None:
    clock = Clock()
    waiter = waiting(clock, timeout_s=2.5)
    assert len(list(waiter)) == 4
    assert clock.pauses == [1.0, 1.0, 0.5]
    assert waiter.timed_out


def test_the_deadline_can_only_come_nearer() -> None:
    clock = Clock()
    waiter = waiting(clock, timeout_s=5)
    for _ in waiter:
        waiter.end_within(9)
        if waiter.elapsed_s == 1:
            waiter.end_within(2)
    assert waiter.elapsed_s == 3
    endless = waiting(clock)
    endless.end_within(0)
    assert len(list(endless)) == 1


def test_a_long_wait_logs_its_present_reason_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    waiter = waiting(clock, timeout_s=2 * REPORT_S + 1, explain=lambda: f"{clock.now_s:g} o'clock")
    list(waiter)
    assert [record.message for record in caplog.records] == [
        f"waiting for {REPORT_S:.0f} s: {100 + REPORT_S:g} o'clock",
        f"waiting for {2 * REPORT_S:.0f} s: {100 + 2 * REPORT_S:g} o'clock",
    ]


def test_a_short_wait_explains_nothing() -> None:
    def explain() -> str:
        raise AssertionError("the reason costs calls to the server")

    list(waiting(Clock(), timeout_s=REPORT_S - 1, explain=explain))


def test_a_stop_ends_the_wait_without_a_timeout() -> None:
    clock, stop = Clock(), threading.Event()
    waiter = Waiter(clock, explain=lambda: "", stop=stop, now=clock)
    for check, _ in enumerate(waiter):
        if check == 2:
            stop.set()
    assert len(clock.pauses) == 3
    assert not waiter.timed_out
    assert list(waiter) == []
