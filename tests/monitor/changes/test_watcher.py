"""A watcher calls once for a change, as do several; a command that fails or hangs holds nothing up."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ServerRefused
from rollq.monitor.changes.change import UNREADABLE, Look
from rollq.monitor.changes.command import Command
from rollq.monitor.changes.watcher import ChangeWatcher
from support.buffer_run import World
from support.waiting import wait_until

KEEP = ("sh", "-c", "cat >> calls.jsonl")
HANG = ("sh", "-c", "cat >> calls.jsonl; sleep 100000")


Note = Callable[[str, bool], str | None]


def noting(buffer: Buffer) -> Note:
    """Notes the state in the buffer."""
    return lambda state, if_absent: buffer.replace_reported_state(state, if_absent=if_absent)


class Seen:
    """The state of a run as watchers see it."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.looks = 0

    def __call__(self) -> Look:
        self.looks += 1
        return Look(self.state, f"it is {self.state}", ("do something",))

    def again(self) -> None:
        """Wait until it has been looked at twice more, so that the look before has had its effect."""
        enough = self.looks + 2
        wait_until(lambda: self.looks >= enough)


def watcher(
    seen: Seen,
    folder: Path,
    replace: Note,
    words: Sequence[str] = KEEP,
    *,
    failures: list[str] | None = None,
    last_look: bool = False,
) -> ChangeWatcher:
    command = Command(tuple(words), folder, folder / "log")
    given = [] if failures is None else failures
    return ChangeWatcher(
        "sums", seen, command, after_s=0, replace=replace, last_look=last_look, on_failure=given.append
    )


def calls(folder: Path) -> list[tuple[str, str]]:
    """The states before and after of each call."""
    path = folder / "calls.jsonl"
    made = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    return [(call["before"], call["state"]) for call in made]


def test_two_watchers_report_each_change_once(buffer: Buffer, tmp_path: Path) -> None:
    World(buffer).start(math={})
    one, other = Seen("training"), Seen("training")
    with (
        watcher(one, tmp_path, noting(buffer)) as first,
        watcher(other, tmp_path, noting(buffer)) as second,
    ):
        for state in ("training", "trainer gone", "training"):
            one.state = other.state = state
            one.again()
            other.again()
        assert first.calls.succeeded + second.calls.succeeded == 2
    assert calls(tmp_path) == [("training", "trainer gone"), ("trainer gone", "training")]


def test_one_that_starts_later_reports_a_change_that_nobody_saw(buffer: Buffer, tmp_path: Path) -> None:
    World(buffer).start(math={})
    buffer.replace_reported_state("training")
    seen = Seen("failing")
    with watcher(seen, tmp_path, noting(buffer)):
        seen.again()
    assert calls(tmp_path) == [("training", "failing")]


def test_the_first_state_of_a_run_is_not_a_change(buffer: Buffer, tmp_path: Path) -> None:
    World(buffer).start(math={})
    seen = Seen("starting")
    with watcher(seen, tmp_path, noting(buffer)):
        seen.again()
    assert calls(tmp_path) == []


def test_a_run_that_does_not_exist_yet_is_not_reported(buffer: Buffer, tmp_path: Path) -> None:
    World(buffer).start(math={})
    seen = Seen(UNREADABLE)
    with watcher(seen, tmp_path, noting(buffer)):
        seen.again()
        seen.state = "starting"
        seen.again()
    assert calls(tmp_path) == []


def test_a_server_that_does_not_answer_is_reported_and_its_return_too(buffer: Buffer, tmp_path: Path) -> None:
    World(buffer).start(math={})
    seen = Seen("training")
    with watcher(seen, tmp_path, noting(buffer)):
        for state in ("training", UNREADABLE, "training"):
            seen.state = state
            seen.again()
    assert calls(tmp_path) == [("training", UNREADABLE), (UNREADABLE, "training")]


def test_one_whose_user_may_not_note_calls_and_says_so(tmp_path: Path) -> None:
    def refuse(_: str, __: bool) -> str | None:
        raise ServerRefused("no permission")

    seen, failures = Seen("training"), list[str]()
    with watcher(seen, tmp_path, refuse, failures=failures):
        seen.again()
        seen.state = "failing"
        seen.again()
    assert calls(tmp_path) == [("training", "failing")]
    assert failures == [
        "on_change: every watcher of the run calls the command, because the state cannot be recorded: no permission"
    ]


def test_failures_are_counted_and_reported_once_a_minute_without_arguments(buffer: Buffer, tmp_path: Path) -> None:
    World(buffer).start(math={})
    seen, failures = Seen("a"), list[str]()
    fails = ("sh", "-c", "exit 3", "a-secret")
    with watcher(seen, tmp_path, noting(buffer), fails, failures=failures) as watching:
        for state in ("a", "b", "c"):
            seen.state = state
            seen.again()
        assert watching.calls.by_outcome() == {"succeeded": 0, "failed": 2}
    assert failures == ["on_change: 'sh' ended with exit status 3"]


@pytest.mark.parametrize("interrupt", [None, KeyboardInterrupt])
def test_the_end_kills_a_command_that_hangs(
    interrupt: type[BaseException] | None, buffer: Buffer, tmp_path: Path
) -> None:
    World(buffer).start(math={})
    seen = Seen("training")
    watching = watcher(seen, tmp_path, noting(buffer), HANG, last_look=interrupt is not None)
    with watching:
        seen.again()
        seen.state = "failing"
        wait_until(lambda: calls(tmp_path) == [("training", "failing")])
        watching.__exit__(interrupt, None, None)
        assert watching.calls.failed == 1
        assert all(thread.name != "on_change" for thread in threading.enumerate())


def test_the_last_look_reports_the_end_at_once(buffer: Buffer, tmp_path: Path) -> None:
    World(buffer).start(math={})
    buffer.replace_reported_state("training")
    seen = Seen("stopped")
    command = Command(KEEP, tmp_path)
    with ChangeWatcher("sums", seen, command, after_s=3600, replace=noting(buffer), last_look=True) as watching:
        assert watching.calls.succeeded == 0
    assert watching.calls.succeeded == 1
    assert calls(tmp_path) == [("training", "stopped")]


def test_an_interrupt_leaves_the_last_look_out(buffer: Buffer, tmp_path: Path) -> None:
    World(buffer).start(math={})
    buffer.replace_reported_state("training")
    with pytest.raises(KeyboardInterrupt), ChangeWatcher(
        "sums", Seen("stopped"), Command(KEEP, tmp_path), after_s=3600, replace=noting(buffer),
        last_look=True,
    ):  # fmt: skip
        raise KeyboardInterrupt
    assert calls(tmp_path) == []
