"""The RQ side of a worker: hundreds of tickets in flight in one process, visible to and commanded by RQ's tools.

`RqWorker` registers and heartbeats like any RQ worker, pops tickets (crash-safe, through RQ's intermediate queue),
hands them in batches to a `TicketHandler`, and lets `JobRecords` write RQ's records. It does not know groups,
engines or leases.

Invariant: a popped ticket is either given to the handler, recorded as failed, or put back. Content of Redis
is only data: jobs that are not tickets of this run are never executed.
"""

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Any, Protocol, TypeVar

from redis.client import PubSub, PubSubWorkerThread
from redis.exceptions import OutOfMemoryError, RedisError
from rq import Queue, worker_registration
from rq.job import JobStatus
from rq.utils import now
from rq.worker import BaseWorker, WorkerStatus

from rollq.buffer.errors import RunMismatch, ServerError, StoreLost, TicketRefused
from rollq.buffer.store.connection import Patience, patiently
from rollq.buffer.tickets import MAX_GROUPS, Ticket, TicketJob
from rollq.workers.rq.records import JobRecord, JobRecords
from rollq.workers.rq.ticket_source import BLOCK_S, TicketSource

log = logging.getLogger(__name__)

T = TypeVar("T")

WORKER_TTL_S = 30  # RQ adds 60 s to it
HEARTBEAT_S = 10
MAINTENANCE_S = 600
MAX_TAKE = 256
"""Groups taken at a time: a call of the buffer stays short, and some groups are made while others are leased."""
LAST_POP_S = 2 * BLOCK_S
HAND_BACK_S = 2.0
"""How long cancelled tickets may take to hand back their groups."""


class TicketGroups(Protocol):
    """The groups that were leased for one ticket."""

    @property
    def groups(self) -> Sequence[str]:
        """Names of the groups, for people; empty when nothing was pending."""

    async def run(self) -> None:
        """Run the groups. When cancelled, hand them back."""


class TicketHandler(Protocol):
    """Does the work of tickets."""

    async def room(self, groups: int) -> int:
        """Wait until `groups` groups, or all that are ever possible, may be taken; return how many. 0 after `stop`."""

    async def take(self, tickets: Sequence[Ticket]) -> Sequence[TicketGroups]:
        """Find work for tickets, one answer each."""

    def stop(self) -> None:
        """From now on `room` is 0 and `take` finds nothing."""


def incarnation_name(name: str) -> str:
    """`name` with a random part: RQ refuses the name of a killed worker until its key expires."""
    return f"{name}-{secrets.token_hex(4)}"


class RqWorker(BaseWorker):
    """An RQ worker that keeps as many tickets in flight as its work has room for."""

    job_class = TicketJob

    def __init__(self, queue: Queue, run: str, work: TicketHandler, *, name: str, grace_s: float):
        """`name`: see `incarnation_name`. `grace_s`: how long tickets in flight may go on after a stop."""
        super().__init__(
            [queue],
            name=name,
            connection=queue.connection,
            job_class=TicketJob,
            serializer=queue.serializer,
            worker_ttl=WORKER_TTL_S,
            maintenance_interval=MAINTENANCE_S,
            prepare_for_work=False,
        )
        self.hostname, self.pid = socket.gethostname(), os.getpid()
        self.fatal: BaseException | None = None
        self._run = run
        self._queue = queue
        self._work = work
        self._grace_s = grace_s
        self._closing = threading.Event()
        self._patience = Patience(unanswered_s=inf, unready_s=inf, closed=self._closing)
        self._source = TicketSource(queue, self._patience)
        self._ledger = JobRecords(queue, self.name, self.key, self._patience)
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._in_flight: dict[str, tuple[asyncio.Task[None], JobRecord]] = {}
        self._groups_per_ticket = MAX_GROUPS  # until the first ticket is seen
        self._threads = ThreadPoolExecutor(2, "rq")
        self._writer = ThreadPoolExecutor(1, "rq-ledger")

    @property
    def dequeue_timeout(self) -> int:
        """How long a pop may block, s; RQ derives its socket timeout from it."""
        return BLOCK_S

    async def run(self) -> None:
        """Work until asked to stop; then let tickets in flight finish within the grace period.

        Raises `ServerUnavailable` or `ServerRefused` when it cannot register, and what stopped it when that is final
        (`StoreLost`, `RunMismatch`, `ServerRefused`, or the error given to `give_up`).
        """
        self._loop = asyncio.get_running_loop()
        await self._call(self._register)
        intake = asyncio.create_task(self._intake())
        parts = [intake, asyncio.create_task(self._heartbeats()), asyncio.create_task(self._ledger.run(self._writer))]
        for part in parts:
            part.add_done_callback(self._part_ended)
        try:
            await self._stopping.wait()
            await asyncio.wait([intake], timeout=LAST_POP_S)  # longer only when a server is away
            await self._finish()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.wait(parts)
            self._closing.set()  # waits for an absent server end here
            await self._say_goodbye()
        if self.fatal is not None:
            raise self.fatal

    def request_shutdown(self) -> None:
        """Stop: no new tickets. The second call gives up the tickets in flight. Must run on the event loop."""
        if self._stopping.is_set():
            log.warning("worker %s: stopping at once", self.name)
            self._forced.set()
            return
        log.info("worker %s: stopping; %d tickets in flight may finish", self.name, len(self._in_flight))
        self._stopping.set()
        self._work.stop()

    def give_up(self, error: BaseException) -> None:
        """Stop at once because of a final error, which `run` raises."""
        self.fatal = self.fatal or error
        if not self._stopping.is_set():
            self.request_shutdown()
        self._forced.set()

    def _part_ended(self, part: "asyncio.Task[None]") -> None:
        error = None if part.cancelled() else part.exception()
        if error is not None:
            self.give_up(error)

    def install_signals(self) -> None:
        """Stop on SIGTERM and SIGINT. Must run on the event loop of the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.request_shutdown)

    # tickets

    async def _intake(self) -> None:
        while True:
            room = await self._work.room(self._groups_per_ticket)
            if not room:
                return
            room = min(room, MAX_TAKE)
            jobs = await self._call(self._source.pop, max(1, room // self._groups_per_ticket))
            if jobs and self._stopping.is_set():
                await self._call(self._source.put_back, jobs)
                return
            try:
                await self._start(await self._accept(jobs, room))
            except (StoreLost, RunMismatch) as error:
                await self._call(self._source.put_back, jobs)
                self.give_up(error)

    async def _accept(self, jobs: Sequence[TicketJob], room: int) -> list[tuple[JobRecord, Ticket]]:
        """Keep the tickets that fit (one at least), put back the others; record jobs that are not tickets as failed."""
        accepted: list[tuple[JobRecord, Ticket]] = []
        too_many: list[TicketJob] = []
        for job in jobs:
            record = JobRecord(job)
            try:
                ticket = job.ticket(self._run)
            except TicketRefused as error:
                log.error("%s", error)
                record.end(JobStatus.FAILED, f"{type(error).__name__}: {error}")
                self._ledger.note(record)
                continue
            if accepted and ticket.groups > room:
                too_many.append(job)
            else:
                accepted.append((record, ticket))
                room -= ticket.groups
        if too_many:
            await self._call(self._source.put_back, too_many)
        return accepted

    async def _start(self, accepted: Sequence[tuple[JobRecord, Ticket]]) -> None:
        if not accepted:
            return
        tickets = [ticket for _, ticket in accepted]
        self._groups_per_ticket = max(ticket.groups for ticket in tickets)
        for (record, _), taken in zip(accepted, await self._work.take(tickets), strict=True):
            record.groups = taken.groups
            if taken.groups:
                task = asyncio.create_task(self._perform(record, taken))
                self._in_flight[record.job.id] = (task, record)
            else:
                record.end(JobStatus.FINISHED)
            self._ledger.note(record)

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
            self.give_up(error)
        except Exception as error:  # a ticket's failure is recorded in RQ and affects no other
            log.exception("ticket %s failed", record.job.id)
            record.end(JobStatus.FAILED, "".join(traceback.format_exception(error)))
        else:
            record.end(JobStatus.FINISHED)
        finally:
            del self._in_flight[record.job.id]
            self._ledger.note(record)

    async def _finish(self) -> None:
        """Wait for the tickets in flight, at most for the grace period; then cancel what is left."""
        tasks = [task for task, _ in self._in_flight.values()]
        if not tasks:
            return
        forced = asyncio.create_task(self._forced.wait())
        done = asyncio.create_task(asyncio.wait(tasks))
        await asyncio.wait([forced, done], timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        done.cancel()
        rest = [task for task in tasks if not task.done()]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=HAND_BACK_S)

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_in_executor(self._threads, partial(function, *args))

    # registration, heartbeats, commands

    def _register(self) -> None:
        patiently(self.connection, self._enter)
        self.subscribe()  # type: ignore[no-untyped-call]
        log.info("worker %s listens on %s", self.name, self._queue.name)

    def _enter(self) -> None:
        try:
            self.register_birth()  # type: ignore[no-untyped-call]
            self.set_state(WorkerStatus.STARTED)
        except OutOfMemoryError as error:  # work is what empties a full server; every heartbeat registers again
            log.warning("worker %s: not yet in RQ's list of workers: %s", self.name, error)

    async def _heartbeats(self) -> None:
        while True:
            await self._loop.run_in_executor(self._writer, self._beat, bool(self._in_flight))
            await asyncio.sleep(HEARTBEAT_S)

    def _beat(self, busy: bool) -> None:
        def beat() -> None:
            with self.connection.pipeline(transaction=False) as pipe:
                self.heartbeat(pipeline=pipe)
                self.set_state(WorkerStatus.BUSY if busy else WorkerStatus.IDLE, pipeline=pipe)
                pipe.hset(self.key, mapping=self.serialize())  # the key may have expired during an outage
                worker_registration.register(self, pipe)
                pipe.execute(raise_on_error=False)  # full memory refuses it; the next one may pass

        patiently(self.connection, beat, self._patience)
        self._ledger.beat()
        if self.should_run_maintenance_tasks:
            self._clean()

    def _clean(self) -> None:
        try:
            self.clean_registries()  # type: ignore[no-untyped-call]
        except Exception:  # RQ's cleaning fails on malformed jobs in its queues
            log.warning("worker %s: RQ's maintenance failed", self.name, exc_info=True)
            self.last_cleaned_at = now()  # type: ignore[assignment]  # RQ types it as None

    async def _say_goodbye(self) -> None:
        try:
            await self._ledger.flush(self._writer)
            await self._call(self.teardown)
        except (RedisError, ServerError, OSError) as error:
            log.warning("worker %s: could not sign off: %s", self.name, error)
        self._threads.shutdown(wait=False)
        self._writer.shutdown(wait=False)

    def handle_payload(self, message: Any) -> None:
        """Carry out a command of RQ's (`rq.command`). Runs in the subscription's thread."""
        try:
            payload = json.loads(message["data"])
            command, job_id = payload["command"], payload.get("job_id")
        except (ValueError, TypeError, KeyError, AttributeError):
            log.warning("worker %s: ignored a malformed command: %.200r", self.name, message.get("data"))
            return
        if command == "shutdown":
            self._loop.call_soon_threadsafe(self.request_shutdown)
        elif command == "stop-job":
            self._loop.call_soon_threadsafe(self._stop_ticket, job_id)
        else:
            log.warning("worker %s: ignored command %.80r, which is not supported", self.name, command)

    def _stop_ticket(self, job_id: Any) -> None:
        entry = self._in_flight.get(job_id)
        if entry is None:
            log.info("worker %s: asked to stop job %.80r, which does not run here", self.name, job_id)
            return
        task, record = entry
        record.end(JobStatus.STOPPED, "stopped by RQ's stop-job command")
        task.cancel()

    def _pubsub_exception_handler(self, exc: Exception, pubsub: PubSub, pubsub_thread: PubSubWorkerThread) -> None:
        """Keep listening for commands through outages; the driver subscribes again when the server is back."""
        if not isinstance(exc, RedisError | OSError):
            raise exc
        self._closing.wait(1.0)
