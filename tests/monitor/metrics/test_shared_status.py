"""All who ask within a second share a reading; a server that fails or hangs is a run that cannot be read."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollq.buffer.errors import ServerUnavailable
from rollq.monitor.metrics.shared_status import MOST_OFTEN_S, SharedReading
from rollq.monitor.status.read import RunStatus
from support.run_statuses import run_status
from support.waiting import PATIENCE_S


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Reads:
    """Counts readings, each of which does what `do` says."""

    def __init__(self, do: Callable[[], RunStatus] = run_status) -> None:
        self.do = do
        self.count = 0

    def __call__(self) -> RunStatus:
        self.count += 1
        return self.do()


def fail() -> RunStatus:
    raise ServerUnavailable("redis://a: no answer")


def test_all_who_ask_within_a_second_share_a_reading() -> None:
    clock, reads = Clock(), Reads()
    reading = SharedReading(reads, now=clock, longest_s=PATIENCE_S)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: reading.status(), range(50)))
    assert all(status == run_status() for status in found)
    assert reads.count == 1
    clock.now_s += MOST_OFTEN_S
    assert reading.status() is not None
    assert reads.count == 2


def test_a_server_that_fails_is_asked_once_a_second_too_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    clock, reads = Clock(), Reads(fail)
    reading = SharedReading(reads, now=clock, longest_s=PATIENCE_S)
    for _ in range(3):
        assert reading.status() is None
        assert reading.status() is None
        clock.now_s += MOST_OFTEN_S
    assert reads.count == 3
    assert [record.message for record in caplog.records] == ["the run cannot be read: redis://a: no answer"]
    assert reading.problem == "redis://a: no answer"
    reads.do = run_status
    assert reading.status() is not None
    assert reading.problem == ""


def test_a_server_that_hangs_holds_nobody_up_and_is_read_by_one_thread() -> None:
    clock, answer = Clock(), threading.Event()

    def hang() -> RunStatus:
        assert answer.wait(PATIENCE_S)
        return run_status()

    reads = Reads(hang)
    reading = SharedReading(reads, now=clock, longest_s=0.05)
    for _ in range(3):
        assert reading.status() is None
        clock.now_s += MOST_OFTEN_S
    assert reads.count == 1
    assert "has not answered" in reading.problem
    answer.set()
    patient = threading.Event()
    while reading.status() is None and not patient.wait(0.01):
        pass
    assert reading.status() == run_status()
