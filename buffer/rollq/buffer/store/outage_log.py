"""Log lines about unavailable servers: one for each outage, and one for each minute of it.

All threads in a process that wait for the same server share these lines.
"""

import threading
from dataclasses import dataclass

EVERY_S = 60.0


@dataclass(slots=True)
class _Outage:
    since_s: float
    said_s: float


class Outages:
    """The outages that threads in this process wait out, by server name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outages: dict[str, _Outage] = {}

    def due(self, name: str, now_s: float) -> float | None:
        """Note that `name` does not serve; returns the outage's length so far if a line is due, else None."""
        with self._lock:
            if (outage := self._outages.get(name)) is None:
                self._outages[name] = _Outage(now_s, now_s)
                return 0.0
            if now_s - outage.said_s < EVERY_S:
                return None
            outage.said_s = now_s
            return now_s - outage.since_s

    def end(self, name: str, now_s: float) -> float | None:
        """Note that `name` serves, or is given up; returns the outage's length, None if its end was noted before."""
        with self._lock:
            outage = self._outages.pop(name, None)
        return None if outage is None else now_s - outage.since_s
