"""What a producer says about its work: a line per task every few seconds, and the reason when nothing moves.

Deaths of workers and a full server are told at once; the rest is summed up, so that a fast run does not flood its log.
"""

import logging
from collections import Counter
from collections.abc import Mapping

from rollq.producer.strategy import SchedulePlan

log = logging.getLogger(__name__)

REPORT_S = 10.0
_AT_ONCE = ("taken from dead workers", "quarantined")


class ProgressLog:
    """Sums of what moved per task since the last report. Time is an argument: seconds of any steady clock."""

    def __init__(self) -> None:
        self._moved: dict[str, Counter[str]] = {}
        self._plans: dict[str, SchedulePlan] = {}
        self._told: dict[str, str] = {}
        self._reported_s: float | None = None

    def note(self, task: str, plan: SchedulePlan, moved: Mapping[str, int]) -> None:
        """Remember one look at `task`."""
        for what in _AT_ONCE:
            if moved.get(what):
                log.warning("task %s: %d groups %s", task, moved[what], what)
        self._moved.setdefault(task, Counter()).update({what: n for what, n in moved.items() if n})
        self._plans[task] = plan

    def report(self, now_s: float) -> None:
        """Log what moved, or once why nothing does; at most every `REPORT_S`."""
        if self._reported_s is not None and now_s - self._reported_s < REPORT_S:
            return
        self._reported_s = now_s
        for task, plan in self._plans.items():
            moved = self._moved.pop(task, None)
            if moved:
                parts = ", ".join(f"{n} {what}" for what, n in moved.items())
                log.info("task %s: %s; %d of %d groups scheduled", task, parts, plan.outstanding, plan.target)
            elif plan.reason and plan.reason != self._told.get(task):
                log.info("task %s: nothing to schedule: %s", task, plan.reason)
            self._told[task] = "" if moved else plan.reason
