"""Tickets: what RQ may store, and what a job may name."""

import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from redis.exceptions import ConnectionError as DriverConnectionError
from rq import Queue, SimpleWorker
from rq.job import Callback, JobStatus

from rollq.buffer.errors import ConfigError, ServerUnavailable, TicketRefused
from rollq.buffer.store.connection import Patience
from rollq.buffer.tickets import (
    FAILURE_TTL_S,
    MAX_GROUPS,
    TICKET_TTL_S,
    Ticket,
    TicketJob,
    TicketSerializer,
    enqueue_tickets,
    open_queue,
    tickets_missing,
    tickets_queued,
)
from rollq.workers.rq.records import JobRecord, JobRecords
from rollq.workers.rq.ticket_source import TicketSource


@pytest.fixture
def queue(server_url: str, run_name: str) -> Queue:
    return open_queue(server_url, run_name)


def fetch(queue: Queue, job_id: str) -> TicketJob:
    job = TicketJob.fetch(job_id, connection=queue.connection, serializer=TicketSerializer)
    assert isinstance(job, TicketJob)
    return job


def job_of(queue: Queue, data: bytes) -> TicketJob:
    job = TicketJob("planted", connection=queue.connection, serializer=TicketSerializer)
    job.data = data
    return job


def test_tickets_are_counted_and_read_back(queue: Queue, run_name: str) -> None:
    ids = enqueue_tickets(queue, run_name, 1100, 16)
    assert tickets_queued(queue) == 1100
    assert queue.connection.llen(f"rq:queue:rollq-{run_name}") == 1100
    job = fetch(queue, ids[0])
    assert job.ticket(run_name) == Ticket(run_name, 16)
    assert job.failure_ttl == FAILURE_TTL_S


def test_tickets_hold_no_pickle(queue: Queue, run_name: str) -> None:
    (job_id,) = enqueue_tickets(queue, run_name, 1, 1)
    job = fetch(queue, job_id)
    assert orjson.loads(job.data) == ["rollq.generate", None, [], {"run": run_name, "groups": 1}]


def test_a_pool_of_workers_has_a_queue_of_its_own(server_url: str) -> None:
    assert open_queue(server_url, "gsm8k", pool="big").name == "rollq-gsm8k-big"
    with pytest.raises(ConfigError, match="pool"):
        open_queue(server_url, "gsm8k", pool="a:b")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (orjson.dumps(["os.system", None, ["true"], {}]), "'os.system', which is not allowed"),
        (orjson.dumps(["rollq.generate", "builtins", [], {}]), "not allowed"),
        (orjson.dumps([["rollq.generate"], None, [], {}]), "not allowed"),
        (orjson.dumps(["rollq.generate", None, [], {"run": "r"}]), "not a ticket"),
        (orjson.dumps(["rollq.generate", None, [], {"run": "r", "groups": True}]), "True groups"),
        (orjson.dumps(["rollq.generate", None, [], {"run": "r", "groups": MAX_GROUPS + 1}]), "1 to 4096"),
        (orjson.dumps(["rollq.generate", None, [], {"run": "a:b{c}*", "groups": 1}]), "run name"),
        (orjson.dumps(["rollq.generate", None, [], {"run": "other", "groups": 1}]), "run 'other'"),
        (orjson.dumps({"run": "r"}), "not a ticket in orjson"),
        (b"\x80\x04\x95 pickle", "not a ticket in orjson"),
    ],
)
def test_jobs_that_are_no_tickets_are_refused(queue: Queue, data: bytes, message: str) -> None:
    with pytest.raises(TicketRefused, match=message):
        job_of(queue, data).ticket("r")


def test_callbacks_webhooks_and_retries_of_a_job_are_dropped_when_it_is_read(queue: Queue, run_name: str) -> None:
    raw: dict[Any, Any] = {
        "data": orjson.dumps(["rollq.generate", None, [], {"run": run_name, "groups": 1}]),
        "success_callback_name": "os.system",
        "failure_callback_name": "os.system",
        "stopped_callback_name": "os.system",
        "webhooks": orjson.dumps([{"url": "http://127.0.0.1:1/", "status": "failed"}]),
        "retries_left": "3",
        "meta": b"\x80\x04 pickle",
    }
    queue.connection.hset(TicketJob.key_for("planted"), mapping=raw)
    job = fetch(queue, "planted")
    callbacks: list[object] = [job.success_callback, job.failure_callback, job.stopped_callback]
    assert callbacks == [None, None, None]
    assert job.webhooks == []
    assert not job.should_retry
    assert job.meta == {}


def test_xp16_even_rqs_own_worker_runs_no_planted_code_with_our_job_class(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimpleWorker, "_install_signal_handlers", lambda worker: None)
    canary = tmp_path / "canary"
    planted = queue.enqueue(os.system, f"touch {canary}", on_failure=Callback(os.system))
    worker = SimpleWorker([queue], connection=queue.connection, job_class=TicketJob, serializer=TicketSerializer)
    worker.work(burst=True)
    assert not canary.exists()
    assert planted.id in queue.failed_job_registry


@pytest.mark.parametrize(
    ("pending", "queued", "groups_per_job", "missing"),
    [(0, 0, 1, 0), (5, 0, 1, 5), (5, 3, 1, 2), (5, 9, 1, 0), (17, 0, 16, 2), (17, 1, 16, 1), (0, 4, 16, 0)],
)
def test_missing_tickets_cover_what_is_pending(pending: int, queued: int, groups_per_job: int, missing: int) -> None:
    assert tickets_missing(pending, queued, groups_per_job) == missing


def test_an_absent_server_is_named(run_name: str) -> None:
    queue = open_queue("redis://127.0.0.1:1/0", run_name)
    with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1") as raised:
        enqueue_tickets(queue, run_name, 1, 1, patience=Patience(unanswered_s=0))
    assert isinstance(raised.value.__cause__, DriverConnectionError)


def test_no_job_outlives_a_killed_worker_for_long(queue: Queue, run_name: str) -> None:
    ids = enqueue_tickets(queue, run_name, 3, 1)
    first, second = TicketSource(queue, Patience()).pop(2)  # the first is only popped when the worker is killed
    records = JobRecords(queue, "worker", "rq:worker:worker", Patience())
    records._write([(JobRecord(second), JobStatus.STARTED)])
    client: Any = queue.connection
    assert {first.id, second.id} < set(ids)
    kept = [key for job_id in ids for key in client.scan_iter(match=f"*{job_id}*")]
    assert len(kept) > len(ids), "the started one has an execution, too"
    assert all(0 < client.ttl(key) <= TICKET_TTL_S for key in kept), {key: client.ttl(key) for key in kept}
