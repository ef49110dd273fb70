"""Engines that share the trainer's GPUs: they sleep while a batch is trained, and wake when weights are published."""

import threading
from datetime import UTC, datetime

from rollq.buffer.store.waiter import Waiter, WakeUps
from rollq.consumer.claims.trainer_lease import TrainerLease


class ColocatedEngines:
    """Puts all engines of a run to sleep and wakes them. Has no effect unless `colocated`."""

    def __init__(self, lease: TrainerLease, events: WakeUps, stop: threading.Event, *, colocated: bool) -> None:
        self._lease = lease
        self._events = events
        self._stop = stop
        self._colocated = colocated

    def sleep(self, step: int) -> bool:
        """Ask every engine to free its memory while `step` is trained. Returns False if stopped before all are
        asleep."""
        if not self._colocated:
            return True
        # the time distinguishes this sleep from an earlier one for the same step
        reason = f"step {step} is being trained, since {datetime.now(UTC).isoformat(timespec='microseconds')}"
        self._lease.buffer.sleep(self._lease.epoch, reason)

        def explain() -> str:
            return f"step {step} needs these engines to sleep: {', '.join(self._awake(reason))}"

        return any(not self._awake(reason) for _ in Waiter(self._events, stop=self._stop, explain=explain))

    def wake(self) -> None:
        """Wake the engines. A task that was paused or had ended before returns to that state."""
        if self._colocated:
            self._lease.buffer.sleep(self._lease.epoch, "")

    def _awake(self, reason: str) -> list[str]:
        """Workers that have not reported sleeping for `reason`."""
        return [name for name, report in self._lease.buffer.workers().items() if report.get("asleep_for") != reason]
