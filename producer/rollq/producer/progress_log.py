"""The producer's log: moves per task, reasons for standstills, and prompts that each pass left out.

Groups taken from dead workers and quarantined groups are logged at once. Other events are summed up, so a fast run does
not flood its log.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum

from rollq.producer.strategy import SchedulePlan

log = logging.getLogger(__name__)

REPORT_S = 10.0
"""Shortest time between two reports."""


class Move(StrEnum):
    """How groups of a task moved, in the words of the log."""

    ADMITTED = "new prompts"
    RECYCLED = "rolled again"
    EXPIRED = "expired"
    REQUEUED = "taken from dead workers"
    QUARANTINED = "quarantined"


_LOGGED_AT_ONCE = (Move.REQUEUED, Move.QUARANTINED)


class ProgressLog:
    """Sums of moves per task since the last report. Time is an argument: seconds on any steady clock."""

    def __init__(self) -> None:
        self._moved: dict[str, Counter[Move]] = {}
        self._plans: dict[str, SchedulePlan] = {}
        self._logged_reasons: dict[str, str] = {}
        self._reported_s: float | None = None

    def note(self, task: str, plan: SchedulePlan, moved: Mapping[Move, int]) -> None:
        """Note the current plan of `task`, and how many of its groups have just moved."""
        for move in _LOGGED_AT_ONCE:
            if moved.get(move):
                log.warning("task %s: %d groups %s", task, moved[move], move)
        self._moved.setdefault(task, Counter()).update({move: n for move, n in moved.items() if n})
        self._plans[task] = plan

    def report(self, now_s: float) -> None:
        """Log each task's moves, or why there are none; at most every `REPORT_S`, and each reason once."""
        if self._reported_s is not None and now_s - self._reported_s < REPORT_S:
            return
        self._reported_s = now_s
        for task, plan in self._plans.items():
            self._report_task(task, plan, self._moved.pop(task, Counter()))

    def _report_task(self, task: str, plan: SchedulePlan, moved: Counter[Move]) -> None:
        if moved:
            parts = ", ".join(f"{n} {move}" for move, n in moved.items())
            log.info("task %s: %s; %d of %d groups scheduled", task, parts, plan.outstanding, plan.target)
        elif plan.reason and plan.reason != self._logged_reasons.get(task):
            log.info("task %s: nothing to schedule: %s", task, plan.reason)
        self._logged_reasons[task] = "" if moved else plan.reason


class PassLog:
    """Logs, at the start of each pass over a task's `rows` prompts, how many were left out."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._reached = 0  # the cursor up to which prompts are counted
        self._left_out = 0

    def note(self, cursor: int, taken: Sequence[int], unusable: int) -> None:
        """Count the prompts that were left out from `cursor` on. `taken` holds the cursor after each taken prompt.

        `unusable` is the number of rows found unusable so far. A range may be noted more than once.
        """
        start = max(cursor, self._reached)
        end = taken[-1] if taken else start
        if end <= start:
            return
        self._left_out += end - start - sum(after > start for after in taken)
        if end // self._rows > self._reached // self._rows:
            log.info(
                "pass %d over %d prompts starts; so far prompts were left out %d times, and %d are unusable",
                end // self._rows,
                self._rows,
                self._left_out,
                unusable,
            )
        self._reached = end
