"""Watches the event loop from a thread, finds the function that blocks it, and keeps the worker's leases.

An `async` function that computes, or sleeps without `await`, blocks everything else that its worker does. Invariant:
the worker keeps its groups, monitors show the blocking function, and a signal can interrupt that function.
"""

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType

from rollq.workers.user_code.errors import is_user_code, place_of

log = logging.getLogger(__name__)

BEAT_S = 0.5
BLOCKED_S = 3.0
"""A loop that does not respond for this many seconds counts as blocked."""
LOOK_S = 1.0


class LoopWatch:
    """Watches the loop that runs `run`. `blocked_by` is the function that blocks the loop, empty if there is none."""

    def __init__(self, while_blocked: Callable[[str], None]) -> None:
        """While a function blocks the loop, the watch's thread calls `while_blocked` with that function every
        `LOOK_S`."""
        self.blocked_by = ""
        self._while_blocked = while_blocked
        self._beat_s = monotonic()
        self._closed = threading.Event()

    async def run(self) -> None:
        """Watch until cancelled."""
        watched = threading.get_ident()
        self._beat_s = monotonic()
        threading.Thread(target=self._watch, args=(watched,), name="loop watch", daemon=True).start()
        try:
            while True:
                self._beat_s = monotonic()
                await asyncio.sleep(BEAT_S)
        finally:
            self._closed.set()

    def interrupt(self) -> None:
        """Interrupt the function that blocks the loop, if any. Called in the loop's thread, by a signal handler."""
        if self.blocked_by:
            raise KeyboardInterrupt

    def _watch(self, watched: int) -> None:
        while not self._closed.wait(LOOK_S):
            silent_s = monotonic() - self._beat_s
            place = "" if silent_s < BLOCKED_S else blocking(sys._current_frames().get(watched))
            if place and place != self.blocked_by:
                log.warning(
                    "%s has blocked this worker's event loop for %.0f s; make it a plain function, which runs in a "
                    "thread, or let it await what it waits for",
                    place,
                    silent_s,
                )
            self.blocked_by = place
            if place:
                try:
                    self._while_blocked(f"{place}, for {silent_s:.0f} s")
                except Exception as error:  # noqa: BLE001 - the next look tries again
                    log.warning("while the event loop was blocked: %s", error)


def blocking(frame: FrameType | None) -> str:
    """The user's function that an event loop is running, given its thread's innermost frame; empty if there is none."""
    while frame is not None and frame.f_code is not asyncio.events.Handle._run.__code__:
        if is_user_code(frame):
            return place_of(frame, frame.f_lineno)
        frame = frame.f_back
    return ""
