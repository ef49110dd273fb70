"""A tracker that raises or hangs at any point costs entries, which are counted, and nothing else."""

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from rollq.consumer.trackers.host import TrackerHost
from rollq.consumer.trackers.tracker import Entry
from support.waiting import PATIENCE_S


class Recording:
    """Keeps what it is given, and does something first."""

    def __init__(self, at_log: Callable[[], object] = object, at_close: Callable[[], object] = object) -> None:
        self.steps: list[int] = []
        self.closed = False
        self._at_log, self._at_close = at_log, at_close

    def log(self, entry: Entry) -> None:
        self._at_log()
        self.steps.append(entry.step)

    def close(self) -> None:
        self._at_close()
        self.closed = True


def fail() -> None:
    raise ValueError("the service is away")


@pytest.fixture
def hang() -> Iterator[Callable[[], object]]:
    """Hangs until the test is over."""
    over = threading.Event()
    yield over.wait
    over.set()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def finish(host: TrackerHost, within_s: float = PATIENCE_S) -> None:
    host.end()
    host.join(within_s)


def test_entries_arrive_in_order_and_the_end_waits_for_them(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recording()
    host = TrackerHost("wandb", lambda: tracker)
    for step in range(1, 11):
        host.log(Entry(step, {}))
    finish(host)
    assert (tracker.steps, tracker.closed) == (list(range(1, 11)), True)
    assert (host.dropped, host.failed, messages(caplog)) == (0, 0, [])


def test_a_tracker_that_raises_at_its_start_fails_every_entry_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make() -> Recording:
        raise ValueError("no key")

    host = TrackerHost("wandb", make)
    for step in range(1, 4):
        host.log(Entry(step, {}))
    finish(host)
    assert (host.dropped, host.failed) == (0, 3)
    assert messages(caplog) == ["tracker wandb failed to start (ValueError: no key); training continues"]


def test_a_tracker_that_raises_at_each_step_is_logged_once_and_still_closed(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recording(at_log=fail)
    host = TrackerHost("mlflow", lambda: tracker)
    for step in range(1, 4):
        host.log(Entry(step, {}))
    finish(host)
    assert (host.dropped, host.failed, tracker.closed) == (0, 3, True)
    assert messages(caplog) == [
        "tracker mlflow failed to log a step (ValueError: the service is away); training continues"
    ]


def test_a_tracker_that_hangs_drops_what_its_queue_does_not_hold(
    hang: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    hangs = threading.Event()

    def say_and_hang() -> None:
        hangs.set()
        hang()

    tracker = Recording(at_log=say_and_hang)
    host = TrackerHost("wandb", lambda: tracker, most_waiting=2)
    host.log(Entry(1, {}))
    assert hangs.wait(PATIENCE_S)
    for step in range(2, 7):
        host.log(Entry(step, {}))
    finish(host, 0.05)
    assert (host.dropped, host.failed) == (3, 0)
    assert messages(caplog) == [
        "tracker wandb does not keep up: step 4 is dropped, and others may be",
        "tracker wandb does not stop; 2 waiting entries are lost",
    ]


def test_a_tracker_that_hangs_at_its_start_drops_too(hang: Callable[[], object]) -> None:
    def make() -> Recording:
        hang()
        return Recording()

    host = TrackerHost("wandb", make, most_waiting=2)
    for step in range(1, 6):
        host.log(Entry(step, {}))
    finish(host, 0.05)
    assert host.dropped == 3


@pytest.mark.parametrize("failure", ["raise", "hang"])
def test_a_tracker_that_fails_at_its_end_is_left_behind(
    failure: str, hang: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Recording(at_close=fail if failure == "raise" else hang)
    host = TrackerHost("wandb", lambda: tracker)
    host.log(Entry(1, {}))
    finish(host, PATIENCE_S if failure == "raise" else 0.05)
    assert len(messages(caplog)) == 1
    assert ("failed to close" if failure == "raise" else "does not stop") in messages(caplog)[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tracker_that_ends_its_thread_drops_the_rest() -> None:
    def exit_thread() -> None:
        raise SystemExit

    tracker = Recording(at_log=exit_thread)
    host = TrackerHost("wandb", lambda: tracker, most_waiting=2)
    host.log(Entry(1, {}))
    host.join(PATIENCE_S)
    host.log(Entry(2, {}))
    finish(host)
    assert host.dropped == 1
