"""The RQ side of a worker: one process with hundreds of tickets in flight, which RQ's tools show and control.

`RqWorker` registers and heartbeats like any RQ worker, pops tickets (crash-safe, through RQ's intermediate queue),
hands them in batches to a `TicketHandler`, and lets `JobRecords` write RQ's records. It handles only the names and
counts of groups, and no engines or leases.

Invariant: a popped ticket is given to the handler, recorded as failed, or put back. Only a second copy of a ticket that
this worker already has is dropped. Redis's content is only data: jobs that are not tickets of this run are never
executed.
"""

import asyncio
import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from types import FrameType
from typing import Any, Protocol, TypeVar

from redis.client import PubSub, PubSubWorkerThread
from redis.exceptions import RedisError
from rq import Queue
from rq.job import JobStatus
from rq.worker import BaseWorker

from rollq.buffer.common.ending import cancel
from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import RunMismatch, ServerError, ServerRefused, StoreLost, TicketRefused
from rollq.buffer.store.connection import Patience
from rollq.buffer.tickets import MAX_GROUPS, Ticket, TicketJob, enqueue_tickets
from rollq.workers.rq.in_flight import Taken, TicketsInFlight
from rollq.workers.rq.records import JobRecord, JobRecords
from rollq.workers.rq.registration import clean, heartbeat, parse_command, register
from rollq.workers.rq.ticket_source import BLOCK_S, TicketSource

log = logging.getLogger(__name__)

T = TypeVar("T")

WORKER_TTL_S = 30  # RQ adds 60 s to it
HEARTBEAT_S = 10
MAINTENANCE_S = 600
LAST_POP_S = 2 * BLOCK_S


class TicketHandler(Protocol):
    """Does the work of tickets."""

    async def room(self) -> int:
        """Wait until groups may be taken, and return their number; 0 after `stop`."""

    async def take(self, tickets: Sequence[Ticket]) -> Taken:
        """Find work for tickets."""

    def stop(self) -> None:
        """From now on, `room` returns 0, and `take` leases nothing."""


def incarnation_name(name: str) -> str:
    """`name` with a random part: RQ refuses the name of a killed worker until its key expires."""
    return f"{name}-{secrets.token_hex(4)}"


def short_host() -> str:
    """This machine's name up to its first dot, reduced to the characters and length that a worker's name allows."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0])[:32] or "worker"


class RqWorker(BaseWorker):
    """An RQ worker that keeps as many tickets in flight as its handler has room for."""

    job_class = TicketJob

    def __init__(
        self, queue: Queue, run: str, work: TicketHandler, *, name: str, grace_s: float, listens: bool = True
    ) -> None:
        """`name` comes from `incarnation_name`. `grace_s` limits how long tickets in flight may take to finish after a
        stop. With `listens`, the worker subscribes to RQ's commands; otherwise, the caller does so with
        `command_channels`.
        """
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
        self._listens = listens
        self._closing = threading.Event()
        self._is_registered = False
        self._patience = Patience(unanswered_s=inf, unready_s=inf, closed=self._closing)
        self._source = TicketSource(queue, self._patience)
        self._ledger = JobRecords(queue, self.name, self.key, self._patience)
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._in_flight = TicketsInFlight(self._ledger, self.give_up)
        self._refused = LogOnce(log)
        self._groups_per_ticket = MAX_GROUPS  # until the first ticket is seen
        self._thread = ThreadPoolExecutor(1, "rq")
        """Serialises all calls to the queue's server, so one connection is enough."""

    @property
    def dequeue_timeout(self) -> int:
        """How many seconds a pop may block. RQ derives its socket timeout from this number."""
        return BLOCK_S

    async def run(self) -> None:
        """Work until asked to stop; then let tickets in flight finish within the grace period.

        Raises `ServerUnavailable` or `ServerRefused` if the worker cannot register, and the final error that stopped it
        (`StoreLost`, `RunMismatch`, `ServerRefused`, or the error passed to `give_up`).
        """
        self._loop = asyncio.get_running_loop()
        try:
            await self._call(register, self, Patience(closed=self._closing))
        except ServerError:
            if not self._stopping.is_set():
                raise
            return
        self._is_registered = True
        log.info("worker %s listens on %s", self.name, self._queue.name)
        intake = asyncio.create_task(self._intake())
        parts = [intake, asyncio.create_task(self._heartbeats()), asyncio.create_task(self._ledger.run(self._thread))]
        for part in parts:
            part.add_done_callback(self.part_ended)
        try:
            await self._stopping.wait()
            await asyncio.wait([intake], timeout=LAST_POP_S)  # longer only if a server is unreachable
            await self._in_flight.finish(self._forced, self._grace_s)
        finally:
            await cancel(parts)
            self._closing.set()  # ends waits for an unreachable server
            await self._say_goodbye()
        if self.fatal is not None:
            raise self.fatal

    def request_shutdown(self) -> None:
        """Stop taking tickets. A second call gives up the tickets in flight. Call this on the event loop."""
        if self._stopping.is_set():
            log.warning("worker %s: stopping at once", self.name)
            self._forced.set()
            return
        log.info("worker %s: stopping; %d tickets in flight may finish", self.name, len(self._in_flight))
        self._stopping.set()
        if not self._is_registered:
            self._closing.set()  # ends waits for an unreachable server
        self._work.stop()

    async def until_stop(self) -> None:
        """Wait until the worker is asked to stop."""
        await self._stopping.wait()

    def give_up(self, error: BaseException) -> None:
        """Stop immediately because of a final error, which `run` raises."""
        self.fatal = self.fatal or error
        if not self._stopping.is_set():
            self.request_shutdown()
        self._forced.set()

    def part_ended(self, part: "asyncio.Task[None]") -> None:
        """Stop immediately if a part of the worker has failed. Failures after the first, as of a lost store, add
        nothing."""
        error = None if part.cancelled() else part.exception()
        if error is not None:
            self.give_up(error)

    def install_signals(self, interrupt: Callable[[], None]) -> None:
        """Stop on SIGTERM and SIGINT. Call this on the main thread's event loop.

        `interrupt` is called immediately, interrupts the running code, and may raise.
        """
        loop = asyncio.get_running_loop()

        def stop(number: int, frame: FrameType | None) -> None:
            if loop.is_closed():  # the loop has ended: nothing is left to stop
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
                return
            loop.call_soon_threadsafe(self.request_shutdown)
            interrupt()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)

    # tickets

    async def _intake(self) -> None:
        while True:
            room = await self._work.room()
            if not room:
                return
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
        """Keep and return the tickets that fit (at least one), and put back the others. Record jobs that are not
        tickets as failed.

        A job that this worker already has is dropped.
        """
        accepted: list[tuple[JobRecord, Ticket]] = []
        too_many: list[TicketJob] = []
        for job in jobs:
            if job.id in self._in_flight or any(job.id == record.job.id for record, _ in accepted):
                log.info("job %s arrived twice: enqueuing it was repeated after a lost reply", job.id)
                await self._call(self._source.drop, job.id)
                continue
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
        taken = await self._work.take(tickets)
        unused, unused_jobs = taken.unused, []
        for (record, ticket), groups in zip(accepted, taken.groups, strict=True):
            record.groups = groups.groups
            if groups.groups:
                self._in_flight.start(record, groups)
            elif ticket.groups <= unused:
                unused -= ticket.groups
                unused_jobs.append(record.job)
                continue
            else:
                record.end(JobStatus.FINISHED)
            self._ledger.note(record)
        if unused_jobs:
            await self._call(self._source.put_back, unused_jobs)
        if unused and not self._stopping.is_set():
            await self._call(self._enqueue_rest, unused)

    def _enqueue_rest(self, groups: int) -> None:
        """Enqueue new tickets for the groups that had no room."""
        tickets = -(-groups // self._groups_per_ticket)
        try:
            enqueue_tickets(self._queue, self._run, tickets, self._groups_per_ticket, patience=self._patience)
        except ServerRefused as error:
            self._refused.warning(
                "rest", "%s: generate rollq.acl again; the rest of large tickets waits for a producer", error
            )

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_in_executor(self._thread, partial(function, *args))

    # heartbeats, commands

    async def _heartbeats(self) -> None:
        while True:
            await self._call(heartbeat, self, len(self._in_flight) > 0, self._patience)
            await self._call(self._ledger.beat)
            if self.should_run_maintenance_tasks:
                await self._call(clean, self)
            await asyncio.sleep(HEARTBEAT_S)

    async def _say_goodbye(self) -> None:
        try:
            await self._ledger.flush(self._thread)
            await self._call(self.teardown)
        except (RedisError, ServerError, OSError) as error:
            log.warning("worker %s: could not sign off: %s", self.name, error)
        self._thread.shutdown(wait=False)

    @property
    def command_channels(self) -> Mapping[str, Callable[[Any], None]]:
        """The channel for RQ's commands to this worker -> the function that carries out a command."""
        return {self.pubsub_channel_name: self.handle_payload}

    def subscribe(self) -> None:
        """Listen to RQ's commands, unless the caller listens to them."""
        if self._listens:
            super().subscribe()  # type: ignore[no-untyped-call]

    def handle_payload(self, message: Any) -> None:
        """Carry out an RQ command (`rq.command`) in the subscription's thread."""
        command = parse_command(message)
        if command is None:
            log.warning("worker %s: ignored a malformed command: %.200r", self.name, message.get("data"))
        elif command.name == "shutdown":
            self._loop.call_soon_threadsafe(self.request_shutdown)
        elif command.name == "stop-job":
            self._loop.call_soon_threadsafe(self._in_flight.stop, command.job_id)
        else:
            log.warning("worker %s: ignored command %.80r, which is not supported", self.name, command.name)

    def _pubsub_exception_handler(self, exc: Exception, pubsub: PubSub, pubsub_thread: PubSubWorkerThread) -> None:
        """Keep listening for commands through outages; the driver subscribes again when the server is back.

        A worker that ends during an outage stops the thread here, because RQ would first unsubscribe, which needs the
        server.
        """
        if not isinstance(exc, RedisError | OSError):
            raise exc
        if self._closing.wait(1.0):
            pubsub_thread.stop()
