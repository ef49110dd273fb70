"""Tickets in flight: each runs as a task, and its outcome is recorded for RQ.

Invariant: a ticket's failure affects no other ticket, unless the run itself is gone.
"""

import asyncio
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rq.job import JobStatus

from rollq.buffer.common.ending import cancel
from rollq.buffer.errors import RunMismatch, StoreLost
from rollq.workers.rq.records import JobRecord, JobRecords

log = logging.getLogger(__name__)

HAND_BACK_S = 2.0
"""How many seconds cancelled tickets may take to hand back their groups."""


class TicketGroups(Protocol):
    """The groups that were leased for one ticket."""

    @property
    def groups(self) -> Sequence[str]:
        """The groups' names for messages; empty when nothing was pending."""

    async def run(self) -> None:
        """Run the groups. When cancelled, hand them back."""


class Taken(NamedTuple):
    """The groups for each ticket; `unused` counts the groups without room."""

    groups: Sequence[TicketGroups]
    unused: int = 0


class TicketsInFlight:
    """The tickets that a worker runs."""

    def __init__(self, records: JobRecords, give_up: Callable[[BaseException], None]) -> None:
        """When the run is gone, `give_up` is called with the error."""
        self._records = records
        self._give_up = give_up
        self._tickets: dict[str, tuple[asyncio.Task[None], JobRecord]] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._tickets

    def start(self, record: JobRecord, taken: TicketGroups) -> None:
        """Run a ticket's groups."""
        task = asyncio.create_task(self._perform(record, taken))
        self._tickets[record.job.id] = (task, record)

    async def _perform(self, record: JobRecord, taken: TicketGroups) -> None:
        try:
            await taken.run()
        except asyncio.CancelledError:
            # Cancelled by `stop-job`, which set the status, or at the end of the grace period. Its groups were given
            # back, so nothing is left to do for this ticket: it counts as finished.
            if record.status is JobStatus.STARTED:
                record.end(JobStatus.FINISHED)
        except (StoreLost, RunMismatch) as error:
            record.end(JobStatus.FAILED, f"{type(error).__name__}: {error}")
            self._give_up(error)
        except Exception as error:  # a ticket's failure is recorded in RQ and affects no other
            log.exception("ticket %s failed", record.job.id)
            record.end(JobStatus.FAILED, "".join(traceback.format_exception(error)))
        else:
            record.end(JobStatus.FINISHED)
        finally:
            del self._tickets[record.job.id]
            self._records.note(record)

    def stop(self, job_id: object) -> None:
        """Stop one ticket, for RQ's command `stop-job`."""
        entry = self._tickets.get(str(job_id))
        if entry is None:
            log.info("asked to stop job %.80r, which does not run here", job_id)
            return
        task, record = entry
        record.end(JobStatus.STOPPED, "stopped by RQ's stop-job command")
        task.cancel()

    async def finish(self, forced: asyncio.Event, grace_s: float) -> None:
        """Wait for all tickets, for at most `grace_s` or until `forced`, then cancel running tickets."""
        tasks = [task for task, _ in self._tickets.values()]
        if not tasks:
            return
        at_once = asyncio.create_task(forced.wait())
        done = asyncio.create_task(asyncio.wait(tasks))
        await asyncio.wait([at_once, done], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        done.cancel()
        await cancel(tasks, HAND_BACK_S)
