"""Waits for the store to reach a state: woken by events, with a poll, a logged reason and a deadline."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Longest pause between two checks, in case a wake-up is lost."""
REPORT_S = 30.0
"""How often a long wait logs its reason."""


class WakeUps(Protocol):
    """A source of wake-ups, such as `rollq.buffer.store.pubsub.Events`."""

    def wait(self, timeout_s: float) -> object:
        """Block until something happens, for at most `timeout_s` seconds."""


class Waiter:
    """One wait. Iterate over it, check the store in the loop's body, and leave the loop when the state is reached.

        waiter = Waiter(events, timeout_s=60, explain=lambda: "no batch yet")
        for _ in waiter:
            if batch := check():
                return batch
        raise TimeoutError(waiter.reason)

    The body runs at least once unless `stop` is set, and once more after the last wake-up before the deadline. The loop
    ends when `stop` is set or, with `timed_out`, after the timeout.
    """

    def __init__(
        self,
        events: WakeUps,
        *,
        explain: Callable[[], str],
        stop: threading.Event | None = None,
        timeout_s: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`explain` returns why the wait is not over; `now` is a steady clock in seconds. `timeout_s` None means no
        timeout."""
        self._events = events
        self._explain = explain
        self._stop = stop or threading.Event()
        self._now = now
        self._started_s = self._reported_s = now()
        self._deadline_s = None if timeout_s is None else self._started_s + timeout_s
        self.timed_out = False

    def __iter__(self) -> Iterator[None]:
        while not self._stop.is_set():
            yield
            now_s = self._now()
            if self._deadline_s is not None and now_s >= self._deadline_s:
                self.timed_out = True
                return
            if now_s - self._reported_s >= REPORT_S:
                self._reported_s = now_s
                log.warning("waiting for %.0f s: %s", self.elapsed_s, self.reason)
            left_s = POLL_S if self._deadline_s is None else self._deadline_s - self._now()
            self._events.wait(min(POLL_S, max(left_s, 0.0)))

    @property
    def reason(self) -> str:
        """Why the wait is not over."""
        return self._explain()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the wait started."""
        return self._now() - self._started_s

    def end_within(self, seconds: float) -> None:
        """Bring the deadline forward to at most `seconds` from now; a nearer deadline stays."""
        deadline_s = self._now() + seconds
        self._deadline_s = deadline_s if self._deadline_s is None else min(self._deadline_s, deadline_s)
