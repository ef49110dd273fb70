"""Takes tickets from an RQ queue and puts them back. Synchronous: calls may block for `BLOCK_S`.

Invariant, except on a server whose memory is full: a popped job stays in RQ's intermediate queue until `JobRecords` has
recorded its start. If the worker is killed in between, RQ's maintenance finds the job there.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from redis.exceptions import OutOfMemoryError
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.suspension import WORKERS_SUSPENDED

from rollq.buffer.store.connection import Patience, patiently
from rollq.buffer.tickets import TicketJob

log = logging.getLogger(__name__)

BLOCK_S = 1
"""How many seconds a pop may block, and so delay a stop."""


class TicketSource:
    """Takes tickets from the queue and puts them back."""

    def __init__(self, queue: Queue, patience: Patience) -> None:
        self._queue = queue
        self._client = queue.connection
        self._patience = patience
        self._was_suspended = False

    def pop(self, limit: int) -> list[TicketJob]:
        """Take up to `limit` jobs from the queue. Wait up to `BLOCK_S` if the queue is empty or `rq suspend` has
        suspended the workers."""
        if self._is_suspended():
            self._patience.closed.wait(BLOCK_S)
            return []
        ids = patiently(self._client, lambda: self._pop_ids(limit) or self._wait_for_id(), self._patience)
        return self._fetch(ids) if ids else []

    def _is_suspended(self) -> bool:
        is_suspended = bool(patiently(self._client, partial(self._client.exists, WORKERS_SUSPENDED), self._patience))
        if is_suspended != self._was_suspended:
            self._was_suspended = is_suspended
            state = "suspended: it takes no tickets until `rq resume`" if is_suspended else "resumed"
            log.warning("queue %s: the worker is %s", self._queue.name, state)
        return is_suspended

    def _pop_ids(self, limit: int) -> list[bytes]:
        with self._client.pipeline(transaction=False) as pipe:
            for _ in range(limit):
                pipe.lmove(self._queue.key, self._queue.intermediate_queue_key)
            return [job_id for job_id in pipe.execute(raise_on_error=False) if isinstance(job_id, bytes)]

    def _wait_for_id(self) -> list[bytes]:
        source, target = self._queue.key, self._queue.intermediate_queue_key
        try:
            first: Any = self._client.blmove(source, target, BLOCK_S)
        except OutOfMemoryError:
            # A full server refuses moves, but not pops. A pop may lose a ticket, which costs nothing.
            popped: Any = self._client.blpop([source], BLOCK_S)
            first = popped and popped[1]
        return [first] if first else []

    def _fetch(self, ids: Sequence[bytes]) -> list[TicketJob]:
        """Return the jobs with the popped ids. Drop ids without a valid job, with a log line."""

        def fetch() -> list[Any]:
            with self._client.pipeline(transaction=False) as pipe:
                for job_id in ids:
                    pipe.hgetall(TicketJob.redis_job_namespace_prefix.encode() + job_id)
                return pipe.execute(raise_on_error=False)

        jobs = []
        for job_id, fields in zip(ids, patiently(self._client, fetch, self._patience), strict=True):
            job = self._restore(job_id, fields)
            if job is None:
                self.drop(job_id.decode(errors="surrogateescape"))
            else:
                jobs.append(job)
        return jobs

    def drop(self, job_id: str) -> None:
        """Forget one popped copy of a job."""
        encoded: Any = job_id.encode(errors="surrogateescape")
        patiently(
            self._client, partial(self._client.lrem, self._queue.intermediate_queue_key, 1, encoded), self._patience
        )

    def _restore(self, job_id: bytes, fields: Any) -> TicketJob | None:
        try:
            job = TicketJob(job_id.decode(), connection=self._client, serializer=self._queue.serializer)
        except ValueError as error:
            log.error("queue %s holds %r, which is not a job id: %s", self._queue.name, job_id, error)
            return None
        if not fields:
            log.info("job %s no longer exists; nothing to do for it", job.id)
            return None
        try:
            job.restore(fields)
        except NoSuchJobError as error:  # no data at all
            log.error("job %s is malformed: %s", job.id, error)
            job.data = b""
        job.origin = self._queue.name
        return job

    def put_back(self, jobs: Sequence[TicketJob]) -> None:
        """Return popped jobs to the head of the queue, in their order."""

        def put_back() -> None:
            with self._client.pipeline(transaction=False) as pipe:
                for job in reversed(jobs):
                    pipe.lrem(self._queue.intermediate_queue_key, 1, job.id)
                    pipe.lpush(self._queue.key, job.id)
                pipe.execute(raise_on_error=False)

        patiently(self._client, put_back, self._patience)
