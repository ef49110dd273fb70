"""Writes RQ's records of many tickets in one round trip.

RQ's workers spend some fifty commands and a dozen round trips on a job. Here, a ticket's record is marked dirty when
the ticket starts and ends, and a single writer writes all dirty records in one pipeline. A ticket that ends before its
start has been written is written once. The writer writes all that RQ's tools read: the job's hash, its execution, the
started, finished and failed registries, and the worker's counters.

Invariant: records are written by one thread at a time, in the order of their changes. Nothing here is authoritative: a
refused or lost record costs a line in `rq info`, but no group.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any
from uuid import uuid4

from redis.client import Pipeline
from redis.exceptions import OutOfMemoryError
from rq import Queue
from rq.executions import Execution, ExecutionRegistry
from rq.job import JobStatus
from rq.registry import FinishedJobRegistry, StartedJobRegistry
from rq.utils import current_timestamp, now, utcformat

from rollq.buffer.errors import ServerError
from rollq.buffer.store.connection import Patience, patiently
from rollq.buffer.tickets import FAILURE_TTL_S, RESULT_TTL_S, TICKET_TTL_S, TicketJob, TicketSerializer

log = logging.getLogger(__name__)

EXECUTION_TTL_S = 120
"""RQ considers a started ticket abandoned when its execution has not been renewed for this many seconds."""
GATHER_S = 0.03
"""How many seconds changes are gathered before they are written. A ticket that ends sooner is written once."""
MAX_RECORDS = 512


@dataclass(slots=True, eq=False)
class JobRecord:
    """RQ's record of one ticket. `groups` holds its groups' names, `task/id`, for `job.meta`."""

    job: TicketJob
    groups: Sequence[str] = ()
    status: JobStatus = JobStatus.STARTED
    error: str = ""
    started_at: datetime = field(default_factory=now)
    ended_at: datetime | None = None
    execution: Execution | None = None

    def end(self, status: JobStatus, error: str = "") -> None:
        """Mark the ticket as finished, failed or stopped."""
        self.status, self.error, self.ended_at = status, error, now()


class JobRecords:
    """Keeps RQ's view of one worker's tickets up to date."""

    def __init__(self, queue: Queue, worker_name: str, worker_key: str, patience: Patience) -> None:
        self._queue = queue
        self._worker_name = worker_name
        self._worker_key = worker_key
        self._patience = patience
        self._started = StartedJobRegistry(queue=queue, job_class=TicketJob)
        self._finished = FinishedJobRegistry(queue=queue, job_class=TicketJob)
        self._dirty: dict[str, JobRecord] = {}
        self._open: dict[str, JobRecord] = {}
        self._changed = asyncio.Event()

    def note(self, record: JobRecord) -> None:
        """Queue a new or changed record for writing."""
        self._dirty[record.job.id] = record
        self._changed.set()

    async def run(self, executor: Executor) -> None:
        """Write changes until cancelled."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(GATHER_S)
            await self.flush(executor)

    async def flush(self, executor: Executor) -> None:
        """Write all changes so far."""
        loop = asyncio.get_running_loop()
        while self._dirty:
            ids = list(self._dirty)[:MAX_RECORDS]
            changes = [(record, record.status) for record in map(self._dirty.pop, ids)]
            await asyncio.shield(loop.run_in_executor(executor, self._write, changes))
        self._changed.clear()

    def beat(self) -> None:
        """Renew RQ's records of the started tickets, so RQ does not abandon the tickets."""
        records = list(self._open.values())
        if records:
            self._send(lambda pipe: self._beat(pipe, records))

    def _write(self, changes: Sequence[tuple[JobRecord, JobStatus]]) -> None:
        """Write changes. A stopping worker does not wait for an unreachable server, since nothing depends on the
        records."""
        try:
            self._write_all(changes)
        except ServerError as error:
            if not self._patience.closed.is_set():
                raise
            log.warning("RQ's records of %d tickets are not written: %s", len(changes), error)

    def _write_all(self, changes: Sequence[tuple[JobRecord, JobStatus]]) -> None:
        started, ended = list[JobRecord](), list[JobRecord]()
        for record, status in changes:
            (started if status is JobStatus.STARTED else ended).append(record)
        for record in started:
            record.execution = Execution(uuid4().hex, record.job.id, self._queue.connection, self._worker_name)
            self._open[record.job.id] = record
        for record in ended:
            self._open.pop(record.job.id, None)

        if not self._send(partial(self._fill, started=started, ended=ended)):
            log.warning("memory of the queue's server is full: RQ's records of %d tickets are dropped", len(changes))
            self._send(partial(self._forget, ended=ended))

    def _fill(self, pipe: Pipeline, started: Sequence[JobRecord], ended: Sequence[JobRecord]) -> None:
        for record in started:
            self._start(pipe, record)
        for record in ended:
            self._end(pipe, record)
        if ended:
            self._count(pipe, ended)

    def _send(self, fill: Callable[[Pipeline], None]) -> bool:
        """Run a pipeline. Returns False when the server's memory is full."""

        def send() -> list[Any]:
            with self._queue.connection.pipeline(transaction=False) as pipe:
                fill(pipe)
                return pipe.execute(raise_on_error=False)

        errors = [reply for reply in patiently(self._queue.connection, send, self._patience) if _is_error(reply)]
        full = any(isinstance(error, OutOfMemoryError) for error in errors)
        if errors and not full:
            log.warning("RQ's bookkeeping: %d commands refused, the first with %s", len(errors), errors[0])
        return not full

    def _start(self, pipe: Pipeline, record: JobRecord) -> None:
        job, execution = record.job, record.execution
        if execution is None:
            return
        execution.save(EXECUTION_TTL_S, pipe)
        ExecutionRegistry(job.id, self._queue.connection).add(execution, EXECUTION_TTL_S, pipe)
        self._started.add_execution(execution, pipe, EXECUTION_TTL_S)
        pipe.hset(job.key, mapping=self._began(record))
        pipe.expire(job.key, TICKET_TTL_S)
        pipe.lrem(self._queue.intermediate_queue_key, 1, job.id)

    def _end(self, pipe: Pipeline, record: JobRecord) -> None:
        job = record.job
        job.ended_at = record.ended_at
        if record.execution is None:
            pipe.hset(job.key, mapping=self._began(record))
            pipe.lrem(self._queue.intermediate_queue_key, 1, job.id)
        else:
            record.execution.delete(job, pipe)
        if record.status is JobStatus.FINISHED:
            ended: dict[Any, Any] = {
                "status": JobStatus.FINISHED.value,
                "ended_at": utcformat(record.ended_at or now()),
            }
            pipe.hset(job.key, mapping=ended)
            pipe.expire(job.key, RESULT_TTL_S)
            pipe.zadd(self._finished.key, {job.id: current_timestamp() + RESULT_TTL_S})
        else:
            job.failure_ttl = FAILURE_TTL_S
            job.set_status(record.status, pipeline=pipe)
            job._handle_failure(record.error, pipe, worker_name=self._worker_name)

    def _began(self, record: JobRecord) -> dict[Any, Any]:
        job = record.job
        job.worker_name, job.started_at, job.last_heartbeat = self._worker_name, record.started_at, record.started_at
        started_at = utcformat(record.started_at)
        return {
            "status": JobStatus.STARTED.value,
            "started_at": started_at,
            "last_heartbeat": started_at,
            "worker_name": self._worker_name,
            "meta": TicketSerializer.dumps({"groups": record.groups}),
        }

    def _count(self, pipe: Pipeline, ended: Sequence[JobRecord]) -> None:
        finished = sum(record.status is JobStatus.FINISHED for record in ended)
        working_s = sum((record.ended_at - record.started_at).total_seconds() for record in ended if record.ended_at)
        pipe.hincrby(self._worker_key, "successful_job_count", finished)
        pipe.hincrby(self._worker_key, "failed_job_count", len(ended) - finished)
        pipe.hincrbyfloat(self._worker_key, "total_working_time", working_s)

    def _beat(self, pipe: Pipeline, records: Sequence[JobRecord]) -> None:
        for record in records:
            if record.execution is not None:
                record.execution.heartbeat(self._started, EXECUTION_TTL_S, pipe)

    def _forget(self, pipe: Pipeline, ended: Sequence[JobRecord]) -> None:
        """Delete tickets that cannot be recorded: deleting is allowed when memory is full, and frees some of it."""
        for record in ended:
            pipe.unlink(record.job.key)
            pipe.lrem(self._queue.intermediate_queue_key, 1, record.job.id)
            if record.execution is not None:
                record.execution.delete(record.job, pipe)


def _is_error(reply: Any) -> bool:
    return isinstance(reply, Exception)
