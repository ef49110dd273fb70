"""A worker's rates over the last minute, from increasing totals. Pure."""

from collections import deque
from collections.abc import Mapping

WINDOW_S = 60.0


class LastMinute:
    """The growth of totals within the last `WINDOW_S` seconds."""

    def __init__(self, now_s: float, totals: Mapping[str, float]) -> None:
        """`now_s` is the time on a steady clock; `totals` holds the current totals."""
        self._noted: deque[tuple[float, Mapping[str, float]]] = deque([(now_s, totals)])

    def note(self, now_s: float, totals: Mapping[str, float]) -> None:
        """Note later totals with the same names."""
        self._noted.append((now_s, totals))
        while now_s - self._noted[1][0] >= WINDOW_S:  # keeps one entry that is at least as old as the window
            self._noted.popleft()

    def per_s(self, name: str) -> float:
        """The growth of a total per second."""
        seconds = self._noted[-1][0] - self._noted[0][0]
        return self._growth(name) / seconds if seconds > 0 else 0.0

    def ratio(self, name: str, of: str) -> float | None:
        """The growth of one total divided by the growth of another; None if the second total did not grow."""
        grown = self._growth(of)
        return self._growth(name) / grown if grown else None

    def _growth(self, name: str) -> float:
        return self._noted[-1][1][name] - self._noted[0][1][name]
