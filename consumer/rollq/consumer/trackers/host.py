"""Isolates a tracker from the trainer by a thread and a bounded queue, and counts lost entries."""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from rollq.buffer.common.log_once import LogOnce
from rollq.consumer.trackers.tracker import Entry, Tracker

log = logging.getLogger(__name__)

MOST_WAITING = 64
"""How many entries may wait for a tracker; further entries are dropped."""


class TrackerHost:
    """Makes a tracker and calls it, all in one thread. The methods of the host return at once, except `join`.

    `dropped` counts entries that found the queue full, and `failed` counts entries that the tracker did not accept.
    Each kind of failure is logged once.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], *, most_waiting: int = MOST_WAITING) -> None:
        self.name = name
        self.dropped = 0
        self.failed = 0
        self._make, self._most_waiting = make, most_waiting
        self._queue: SimpleQueue[Entry | None] = SimpleQueue()
        self._log_once = LogOnce(log)
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, entry: Entry) -> None:
        """Hand an entry over, or drop it. Only one thread at a time may call this."""
        if self._queue.qsize() < self._most_waiting and self._thread.is_alive():
            self._queue.put(entry)
            return
        self.dropped += 1
        self._log_once.warning(
            "drop", "tracker %s does not keep up: step %d is dropped, and others may be", self.name, entry.step
        )

    def end(self) -> None:
        """Ask the tracker to write waiting entries and close."""
        self._queue.put(None)

    def join(self, within_s: float) -> None:
        """Wait for the end, at most `within_s` seconds; a tracker that takes longer is left behind."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            waiting = self._queue.qsize() - 1  # the last entry is the request to end
            log.warning("tracker %s does not stop; %d waiting entries are lost", self.name, max(0, waiting))

    def _run(self) -> None:
        tracker = self._started()
        while (entry := self._queue.get()) is not None:
            if tracker is None:
                self.failed += 1
                continue
            try:
                tracker.log(entry)
            except Exception as error:  # noqa: BLE001 - a library may raise any class, and training must continue
                self.failed += 1
                self._warn("log a step", error)
        try:
            if tracker is not None:
                tracker.close()
        except Exception as error:  # noqa: BLE001 - see above
            self._warn("close", error)

    def _started(self) -> Tracker | None:
        try:
            return self._make()
        except Exception as error:  # noqa: BLE001 - see above
            self._warn("start", error)
            return None

    def _warn(self, action: str, error: Exception) -> None:
        message = "tracker %s failed to %s (%s: %s); training continues"
        self._log_once.warning(action, message, self.name, action, type(error).__name__, error, exc_info=error)
