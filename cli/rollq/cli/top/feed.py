"""Reads the run in a thread, so that the screen never waits for the server."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rollq.buffer.errors import RollqError
from rollq.buffer.values.history import HISTORY_ROW_MS, HistoryRow
from rollq.cli.run_reader import RunReader
from rollq.monitor.status.read import RunStatus

EVERY_S = 1.0
HISTORY_ROWS = 360
"""The number of shown history rows: an hour."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The last reading.

    `run` was read at `read_s` on the feed's clock; None before the first reading. `error` says why a newer reading
    failed, or is empty. `history` is the history of `task`.
    """

    run: RunStatus | None = None
    read_s: float = 0.0
    error: str = ""
    task: str = ""
    history: tuple[HistoryRow, ...] = ()


class Feed:
    """Keeps `frame` up to date inside the `with` block. A hanging server blocks only the feed's thread."""

    def __init__(self, reader: RunReader, now: Callable[[], float] = time.monotonic) -> None:
        """`now` is a steady clock in seconds."""
        self.frame = Frame()
        self.task = ""
        """The task whose history is shown; empty means the first task."""
        self.now = now
        self._reader = reader
        self._history_s = -HISTORY_ROW_MS / 1000
        self._woken, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._woken.set()

    def wake(self) -> None:
        """Read again at once."""
        self._woken.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._woken.clear()
            try:
                self.frame = self._read()
            except RollqError as error:
                last = self.frame
                self.frame = Frame(last.run, last.read_s, str(error), last.task, last.history)
            self._woken.wait(EVERY_S)
        self._reader.close()

    def _read(self) -> Frame:
        run, last = self._reader.read(), self.frame
        names = [task.task for task in run.tasks]
        task = self.task if self.task in names else next(iter(names), "")
        history = last.history
        if task and (task != last.task or self.now() - self._history_s >= HISTORY_ROW_MS / 1000):
            history = self._reader.call(lambda buffer: buffer.overview(task, HISTORY_ROWS).rows)
            self._history_s = self.now()
        return Frame(run, self.now(), "", task, history)
