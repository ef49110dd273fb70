"""A worker's dealings with RQ: registration, heartbeats, maintenance and received commands. All calls block."""

import json
import logging
from typing import Any, NamedTuple

from redis import exceptions as driver
from rq import worker_registration
from rq.utils import now
from rq.worker import BaseWorker, WorkerStatus

from rollq.buffer.store.connection import Patience, patiently

log = logging.getLogger(__name__)

RQ_TTL_MARGIN_S = 60
"""The margin that RQ adds to a worker's time to live, in seconds."""


def register(worker: BaseWorker, patience: Patience) -> None:
    """Enter the worker in RQ's list, and subscribe to commands. Raises `ServerUnavailable` or `ServerRefused`."""
    patiently(worker.connection, lambda: _enter(worker), patience)
    patiently(worker.connection, worker.subscribe, patience)


def _enter(worker: BaseWorker) -> None:
    """Like RQ's `register_birth`, but repeatable: no other worker has the name of an incarnation."""
    worker.birth_date = worker.last_heartbeat = now()
    try:
        with worker.connection.pipeline() as pipe:
            pipe.delete(worker.key)
            pipe.hset(worker.key, mapping=worker.serialize())
            worker_registration.register(worker, pipe)
            pipe.expire(worker.key, worker.worker_ttl + RQ_TTL_MARGIN_S)
            worker.set_state(WorkerStatus.STARTED, pipeline=pipe)
            pipe.execute()
    except driver.OutOfMemoryError as error:  # working frees a full server's memory; every heartbeat registers again
        log.warning("worker %s: not yet in RQ's list of workers: %s", worker.name, error)


def heartbeat(worker: BaseWorker, busy: bool, patience: Patience) -> None:
    """Renew the worker's registration and report whether it is busy."""

    def beat() -> None:
        with worker.connection.pipeline(transaction=False) as pipe:
            worker.heartbeat(pipeline=pipe)
            worker.set_state(WorkerStatus.BUSY if busy else WorkerStatus.IDLE, pipeline=pipe)
            pipe.hset(worker.key, mapping=worker.serialize())  # the key may have expired during an outage
            worker_registration.register(worker, pipe)
            pipe.execute(raise_on_error=False)  # refused while memory is full; the next may succeed

    patiently(worker.connection, beat, patience)


def clean(worker: BaseWorker) -> None:
    """Run RQ's maintenance of its registries."""
    try:
        worker.clean_registries()  # type: ignore[no-untyped-call]
    except driver.ConnectionError as error:
        log.warning("worker %s: RQ's maintenance is put off: %s", worker.name, error)
    except Exception:  # RQ's maintenance fails on malformed jobs in its queues
        log.warning("worker %s: RQ's maintenance failed", worker.name, exc_info=True)
        worker.last_cleaned_at = now()  # type: ignore[assignment]  # RQ types it as None


class Command(NamedTuple):
    """An RQ command, such as `stop-job` with the id of a job."""

    name: Any
    job_id: Any


def parse_command(message: Any) -> Command | None:
    """The command in a message from the subscription; None if the message is malformed."""
    try:
        payload = json.loads(message["data"])
        return Command(payload["command"], payload.get("job_id"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
