"""Tickets: rollq's RQ jobs. A ticket says "generate up to n groups of this run" and nothing else.

Invariant: nothing that RQ stores is ever executed or imported. Values are encoded with orjson. The only function that a
job may name is `rollq.generate`, from the table below. A job's callbacks, webhooks, retries and repeats are dropped
when the job is read.
Producers enqueue tickets, and workers pop them; `rq info -j rollq.buffer.tickets.TicketJob -S
rollq.buffer.tickets.TicketSerializer` shows them safely.
"""

import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import orjson
import redis
from redis import exceptions as driver
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq import Queue
from rq.exceptions import DeserializationError
from rq.job import Job
from rq.queue import EnqueueData

from rollq.buffer.errors import ConfigError, TicketRefused
from rollq.buffer.rules.names import check_name
from rollq.buffer.store.connection import Patience, open_client, patiently
from rollq.buffer.store.keys import RunKeys
from rollq.buffer.store.redis_url import mask_url, node_urls

log = logging.getLogger(__name__)

GENERATE = "rollq.generate"
RESULT_TTL_S = 60  # short, but not 0: with 0, RQ uses blocking reads, which are three times slower
FAILURE_TTL_S = 24 * 3600  # RQ's default is a year
TICKET_TTL_S = 24 * 3600
"""A job's lifetime after it is enqueued or started, in seconds: no job outlives its killed worker by more."""
MAX_GROUPS = 4096
ENQUEUE_BATCH = 500
ASK_TIMEOUT_S = 2.0
"""How long a server may take to say that it is a cluster node, in seconds."""


class TicketSerializer:
    """Uses orjson for everything that RQ stores: arguments, meta, results."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        return orjson.dumps(value)

    @staticmethod
    def loads(data: bytes) -> Any:
        return orjson.loads(data)


@dataclass(frozen=True, slots=True)
class Ticket:
    """An order to generate up to `groups` groups of `run`."""

    run: str
    groups: int

    def __post_init__(self) -> None:
        check_name("run", self.run)
        if not isinstance(self.groups, int) or isinstance(self.groups, bool) or not 0 < self.groups <= MAX_GROUPS:
            raise TicketRefused(f"ticket for {self.groups!r} groups: an integer from 1 to {MAX_GROUPS} is allowed")


FUNCTIONS: Mapping[str, Callable[..., Ticket]] = MappingProxyType({GENERATE: Ticket})
"""Every function that a job may name."""


class TicketJob(Job):
    """An RQ job that never imports a name from Redis."""

    def restore(self, raw_data: Any) -> None:
        """Restore the job's data from Redis; a malformed job becomes a job without data, which is refused."""
        try:
            super().restore(raw_data)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            log.error("job %s is malformed: %s: %s", self.id, type(error).__name__, error)
            self.data = b""
        self._success_callback_name = self._failure_callback_name = self._stopped_callback_name = None
        self.webhooks = []
        self.retries_left = self.repeats_left = None
        if "unserialized" in self.meta:
            self.meta = {}

    @property
    def func(self) -> Callable[..., Ticket]:
        """The function that the job names. Raises `TicketRefused` for a function that is not in the table."""
        try:
            name, instance = self.func_name, self.instance
        except DeserializationError as error:
            raise TicketRefused(f"job {self.id!r}: its data is not a ticket in orjson; it was not executed") from error
        if not isinstance(name, str) or name not in FUNCTIONS or instance is not None:
            raise TicketRefused(f"job {self.id!r} names {name!r}, which is not allowed; only {sorted(FUNCTIONS)} are")
        return FUNCTIONS[name]

    @property
    def success_callback(self) -> None:
        return None

    @property
    def failure_callback(self) -> None:
        return None

    @property
    def stopped_callback(self) -> None:
        return None

    def ticket(self, run: str) -> Ticket:
        """The ticket in this job. Raises `TicketRefused` if the job is not a ticket for `run`."""
        function = self.func
        try:
            ticket = function(*self.args, **self.kwargs)
        except (TypeError, ValueError) as error:
            raise TicketRefused(f"job {self.id!r} is not a ticket: {error}") from error
        if ticket.run != run:
            raise TicketRefused(f"job {self.id!r} is a ticket of run {ticket.run!r}, not of {run!r}")
        return ticket


NOT_ON_A_CLUSTER = "RQ does not work on a cluster: set [redis] queue_url, or ROLLQ_QUEUE_URL, to a plain server"


def open_queue(url: str, run: str, *, pool: str | None = None, password: str | None = None) -> Queue:
    """The ticket queue of a run (or of one named pool of its workers) on the Redis server at `url`.

    Raises ConfigError for a URL that names no server, and for a cluster, on which RQ does not work. Waits at most
    `ASK_TIMEOUT_S` for an unavailable server.
    """
    if len(node_urls(url)) > 1:
        raise ConfigError(f"the queue's server {mask_url(url)!r} is a cluster; {NOT_ON_A_CLUSTER}")
    with open_client(url, password, timeout_s=ASK_TIMEOUT_S) as client:
        in_cluster = _is_in_cluster(client)
    if in_cluster:
        raise ConfigError(f"the queue's server {mask_url(url)!r} is a node of a cluster; {NOT_ON_A_CLUSTER}")
    client = open_client(url, password)
    client.set_retry(Retry(NoBackoff(), 0))  # a pop that the driver repeats moves two tickets and reports one
    return Queue(RunKeys(run).queue(pool), connection=client, job_class=TicketJob, serializer=TicketSerializer)


def _is_in_cluster(client: redis.Redis) -> bool:
    """Whether the server says that it is a cluster node; False while it does not answer."""
    try:
        return bool(client.info("cluster").get("cluster_enabled"))
    except driver.RedisError:
        return False


def enqueue_tickets(
    queue: Queue, run: str, count: int, groups_per_job: int, *, patience: Patience | None = None
) -> list[str]:
    """Enqueue `count` tickets for `groups_per_job` groups of `run` each; return their job ids.

    Surplus tickets are harmless. Raises ServerUnavailable or ServerRefused if the server does not take tickets in time.
    """
    ticket = Ticket(run, groups_per_job)
    jobs = [_job_data(ticket) for _ in range(count)]
    for start in range(0, count, ENQUEUE_BATCH):
        patiently(queue.connection, partial(_enqueue, queue, jobs[start : start + ENQUEUE_BATCH]), patience)
    return [job.job_id for job in jobs if job.job_id is not None]


def _enqueue(queue: Queue, jobs: Sequence[EnqueueData]) -> None:
    with queue.connection.pipeline(transaction=True) as pipe:
        for job in queue.enqueue_many(list(jobs), pipeline=pipe):
            pipe.expire(job.key, TICKET_TTL_S)
        pipe.execute()


def _job_data(ticket: Ticket) -> EnqueueData:
    return Queue.prepare_data(
        GENERATE,
        kwargs={"run": ticket.run, "groups": ticket.groups},
        job_id=f"ticket-{secrets.token_hex(8)}",
        timeout=-1,  # groups have a separate attempt timeout
        result_ttl=RESULT_TTL_S,
        failure_ttl=FAILURE_TTL_S,
        description=f"generate {ticket.groups} groups of {ticket.run}",
    )


def tickets_queued(queue: Queue, *, patience: Patience | None = None) -> int:
    """How many tickets wait in the queue, excluding tickets that a worker has."""
    return patiently(queue.connection, lambda: queue.count, patience)


def jobs_by_registry(queue: Queue, *, patience: Patience | None = None) -> dict[str, int]:
    """How many jobs RQ records as executing, finished and failed. Only reads counts and never loads jobs: by default,
    `rq info` unpickles jobs, and so runs code that anyone with access to the queue can plant."""
    registries = {
        "executing": queue.started_job_registry,
        "finished": queue.finished_job_registry,
        "failed": queue.failed_job_registry,
    }

    def counts() -> dict[str, int]:
        return {name: registry.get_job_count(cleanup=False) for name, registry in registries.items()}

    return patiently(queue.connection, counts, patience)


def tickets_missing(pending: int, queued: int, groups_per_job: int) -> int:
    """How many tickets to enqueue so that every pending group has a ticket."""
    return max(0, math.ceil(pending / groups_per_job) - queued)
