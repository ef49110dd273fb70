"""The last reading of a run, shared by all requests within a second."""

import logging
import threading
import time
from collections.abc import Callable

from rollq.buffer.errors import RollqError
from rollq.monitor.status.read import RunStatus

log = logging.getLogger(__name__)

MOST_OFTEN_S = 1.0
"""The server is read at most once in this time, for any number of requests."""
LONGEST_S = 3.0
"""How long a request waits for a hanging server."""


class SharedReading:
    """Reads the status on request, from any thread, once at a time. All callers wait for the reading."""

    def __init__(
        self, read: Callable[[], RunStatus], *, longest_s: float = LONGEST_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`read` may raise `RollqError`; a caller waits `longest_s` for it. `now` is a steady clock in seconds."""
        self._read, self._longest_s, self._now = read, longest_s, now
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._asked_s: float | None = None
        self._status: RunStatus | None = None
        self.problem = ""
        """Why the last request got no status, or empty."""
        self._answers = True

    def status(self) -> RunStatus | None:
        """The status, read within the last second or now; None for a run that cannot be read. Logs the first
        failure."""
        with self._lock:
            is_reading = self._asked_s is not None and not self._ready.is_set()
            if not is_reading and (self._asked_s is None or self._now() - self._asked_s >= MOST_OFTEN_S):
                self._asked_s = self._now()
                self._ready.clear()
                threading.Thread(target=self._read_now, name="reading", daemon=True).start()
        if self._ready.wait(self._longest_s):
            return self._status
        self.problem = f"the server has not answered within {self._longest_s:.0f} s"
        return None

    def _read_now(self) -> None:
        status, problem = None, ""
        try:
            status = self._read()
            if not self._answers:
                log.info("the run can be read again")
        except RollqError as error:
            problem = str(error)
            if self._answers:
                log.warning("the run cannot be read: %s", error)
        finally:
            self._status, self.problem, self._answers = status, problem, status is not None
            self._ready.set()
