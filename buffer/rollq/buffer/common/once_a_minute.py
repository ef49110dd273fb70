"""Decides when to log events that anyone can cause: once a minute, with their count."""

from collections.abc import Callable
from time import monotonic
from typing import Final

PERIOD_S: Final = 60.0


class OnceAMinute:
    """Counts events, and decides which events to log: the first, and then one every `PERIOD_S`."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._logged_s = -PERIOD_S
        self._held_back = 0

    def count(self, events: int = 1) -> int:
        """Count events; returns the number of events since the last log line if it is time for another, else 0."""
        self._held_back += events
        if self._clock() - self._logged_s < PERIOD_S:
            return 0
        found, self._held_back, self._logged_s = self._held_back, 0, self._clock()
        return found
