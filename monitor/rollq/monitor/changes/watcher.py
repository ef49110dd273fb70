"""A thread that checks a run, and calls a command when its state has changed."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from rollq.buffer.common.once_a_minute import OnceAMinute
from rollq.buffer.errors import RollqError
from rollq.monitor.changes.change import UNREADABLE, Look, Steady
from rollq.monitor.changes.command import Command

log = logging.getLogger(__name__)

EVERY_S: Final = 5.0
"""The longest pause between two checks of the run."""
LOOKS: Final = 4
"""The number of checks in the time that a new state must last; at most one check per second."""
STOP_WITHIN_S: Final = 3.0
"""How long the end waits for a running check."""


@dataclass(slots=True)
class Calls:
    """Calls of the command since the start, by outcome."""

    succeeded: int = 0
    failed: int = 0

    def by_outcome(self) -> dict[str, int]:
        """The number of calls by outcome."""
        return {"succeeded": self.succeeded, "failed": self.failed}


class ChangeWatcher:
    """Checks the run in a thread within the `with` block. The command runs in that thread, so nothing else waits.

    A note in the buffer makes several watchers of a run report a change only once. If the note fails, each watcher
    reports the change.
    """

    def __init__(
        self,
        run: str,
        look: Callable[[], Look],
        command: Command,
        *,
        after_s: float,
        replace: Callable[[str, bool], str | None],
        last_look: bool = False,
        on_failure: Callable[[str], object] = log.warning,
    ) -> None:
        """`replace` notes the reported state and returns the previous state (see `Reporting`). With `last_look`, the
        state at the end counts at once. `on_failure` gets a line, at most once a minute."""
        self.calls = Calls()
        self._run, self._look, self._command, self._replace = run, look, command, replace
        self._last_look, self._on_failure = last_look, on_failure
        self._every_s = min(EVERY_S, max(1.0, after_s / LOOKS))
        self._after_s = after_s
        self._steady: Steady | None = None
        self._failures = OnceAMinute()
        self._ends, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="on_change", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the thread and a running command. With `last_look`, take a last look first, unless interrupted."""
        if not self._last_look or kind is KeyboardInterrupt:
            self._stop.set()
        self._ends.set()
        try:
            if not self._stop.is_set():
                self._thread.join()
        finally:
            self._stop.set()
            self._thread.join(STOP_WITHIN_S)  # a check of a hanging server is abandoned

    def _watch(self) -> None:
        while not self._ends.wait(self._every_s):
            self._look_safely(time.monotonic())
        if not self._stop.is_set():
            self._look_safely(float("inf"))

    def _look_safely(self, now_s: float) -> None:
        try:
            self._look_again(now_s)
        except Exception as error:  # noqa: BLE001 - a thread that ended would never call again
            self._fail(f"on_change: the run cannot be read: {type(error).__name__}: {error}")

    def _look_again(self, now_s: float) -> None:
        look = self._look()
        if self._steady is None:
            if look.state == UNREADABLE:  # it may not exist yet
                return
            self._steady = Steady(self._note(look.state, look.state, if_absent=True), self._after_s)
        before = self._steady.state
        if self._steady.has_changed(look.state, now_s):
            reported = before if look.state == UNREADABLE else self._note(look.state, before)
            if before == UNREADABLE:  # it could not be noted, so every watcher reports it and its end
                reported = before
            if reported != look.state:
                self._call(look, reported)

    def _note(self, state: str, before: str, *, if_absent: bool = False) -> str:
        """The previously reported state; `state` itself if another watcher has reported this change."""
        try:
            return self._replace(state, if_absent) or before
        except RollqError as error:
            self._fail(
                f"on_change: every watcher of the run calls the command, because the state cannot be recorded: {error}"
            )
            return before

    def _call(self, look: Look, before: str) -> None:
        log.info("%s: %s after %s; calling %s", self._run, look.state, before, self._command.name)
        problem = self._command.run(look.facts(self._run, before), self._stop)
        if not problem:
            self.calls.succeeded += 1
            return
        self.calls.failed += 1
        self._fail(f"on_change: {self._command.name!r} {problem}")

    def _fail(self, line: str) -> None:
        if count := self._failures.count():
            self._on_failure(line if count == 1 else f"{line} ({count} failures in the last minutes)")
