"""A budget for the processor seconds of a whole test run: its test processes and all that they start.

A fixed piece of work is measured during the run. Seconds are those of a processor that takes `REFERENCE_S` for it.
Processes that outlive their parents are not counted.
"""

import resource
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Final

REFERENCE_S: Final = 0.0105
"""Seconds for the piece of work on a quiet core of CI."""
EVERY_S: Final = 10.0


def piece_of_work() -> float:
    """Do it; returns the processor seconds it took."""
    began_s = time.thread_time()
    sum(number * number % 7 for number in range(200_000))
    return time.thread_time() - began_s


@dataclass
class ProcessorBudget:
    """The use of a run so far, against `limit_s`."""

    limit_s: float
    _samples_s: list[float] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Measure the processor from now on, in a thread."""
        threading.Thread(target=self._sample, daemon=True).start()

    def finish(self) -> None:
        """Stop measuring, when all processes of the run have ended."""
        self._over.set()

    @property
    def slowness(self) -> float:
        """How much longer work takes here than on a quiet core of CI."""
        return statistics.median(self._samples_s) / REFERENCE_S

    @property
    def used_s(self) -> float:
        """Seconds of a quiet core of CI that the run has taken."""
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(one.ru_utime + one.ru_stime for one in used) / self.slowness

    @property
    def is_exceeded(self) -> bool:
        return self.used_s > self.limit_s

    def __str__(self) -> str:
        return (
            f"{self.used_s:.0f} processor seconds of {self.limit_s:.0f}"
            f" (as on a quiet core of CI; work took {self.slowness:.2f} times as long here)"
        )

    def _sample(self) -> None:
        while True:
            self._samples_s.append(piece_of_work())
            if self._over.wait(EVERY_S):
                return
