"""Housekeeping that any role may do: leases that ran out, and groups that became too stale."""

from collections.abc import Collection

import orjson
from rq import Queue

from rollq.buffer.calls.core import BufferCore
from rollq.buffer.calls.replies.leases import Reaped
from rollq.buffer.errors import ConfigError
from rollq.buffer.tickets import enqueue_tickets, tickets_missing, tickets_queued
from rollq.buffer.values.places import Place
from rollq.buffer.values.rollouts import Status

MAX_IDS_PER_CALL = 1000
MOVED_IDS_PER_CALL = 200
"""Keeps a call that makes groups pending again within a few ms of server time."""
SWEEP_IDS_PER_CALL = 50
"""Limits one call of the sweep to 1 or 2 ms of server time, or a few ms if the server's memory is cold."""


class Sweeping(BufferCore):
    """Calls that tidy up. They may run at any time, in any number of processes."""

    def reap(self, task: str, producer: Place | None = None) -> Reaped:
        """Take back groups whose leases ran out. Call this about once a second, in any process.

        `producer` is the calling producer's location, which monitors show.
        """
        total, more = Reaped(0, 0, held=False), True
        caller = orjson.dumps({"host": producer.host, "pid": producer.pid}) if producer else b""
        while more:
            requeued, quarantined, held = self.call_task("reap", task, MOVED_IDS_PER_CALL, caller)
            total = Reaped(total.requeued + requeued, total.quarantined + quarantined, bool(held))
            more = requeued + quarantined == MOVED_IDS_PER_CALL
        return total

    def expire(self, task: str, statuses: Collection[Status] = (Status.COMPLETED, Status.ABORTED)) -> int:
        """Move every too-stale group with one of these statuses to expired, or drop it. Returns how many.

        This only tidies up: such groups stopped counting when the version or step moved. Raises `ConfigError` for
        statuses whose groups do not age.
        """
        if others := sorted(set(statuses) - {Status.COMPLETED, Status.ABORTED}):
            raise ConfigError(f"groups that are {others[0].value} do not expire: give completed, aborted, or both")
        total, skipped, more = 0, 0, bool(statuses)
        names = [status.value for status in statuses]
        while more:
            expired, dropped, more, left = self.call_task("expire", task, SWEEP_IDS_PER_CALL, skipped, *names)
            total, skipped = total + expired + dropped, skipped + left
        return total

    def enqueue_missing_tickets(self, queue: Queue, pending: int, groups_per_job: int) -> None:
        """Add tickets to `queue` until `pending` groups have tickets. Surplus tickets are harmless.

        Raises `ServerUnavailable` or `ServerRefused` if the queue's server does not take them in time.
        """
        queued = tickets_queued(queue, patience=self._patience)
        missing = tickets_missing(pending, queued, groups_per_job)
        enqueue_tickets(queue, self.run, missing, groups_per_job, patience=self._patience)
