"""Measures rollq's worker, including leases and puts, compared with RQ's SimpleWorker, and with hundreds of groups in
flight."""

import logging
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import redis
from rq import Queue, SimpleWorker

from benchmarks.jobs import empty_job
from benchmarks.results import Result, ratios, take_turns
from benchmarks.world import TASK, run, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.sweeping import MAX_IDS_PER_CALL
from rollq.buffer.store.keys import task_keys
from rollq.buffer.tickets import enqueue_tickets, open_queue, tickets_missing
from rollq.buffer.values.rollouts import Prompt, Status
from rollq.workers.groups.task_settings import WorkerTask
from rollq.workers.run import run_worker
from rollq.workers.settings import WorkerSettings

IN_FLIGHT = 256
IN_FLIGHT_NO_OP = 512
"""Groups in flight. Groups that need no generation spend all their time queued between two of the steps: ticket, lease,
loop and put."""
GROUPS_PER_TICKET = 16
POLL_S = 0.002
PATIENCE_S = 120.0


def measure(quick: bool) -> list[Result]:
    """Return three results: 1 and 16 groups per ticket compared with stock RQ, and groups that take 0.5 s, 256 in
    flight."""
    repetitions = 1 if quick else 7
    one, many, stock, slow = (64, 256, 64, 64) if quick else (4_000, 24_000, 1_500, 1_000)
    with server() as running:
        ours = partial(groups_per_s, running.url, "NoOp", IN_FLIGHT_NO_OP)
        single, batched, simple = take_turns(
            repetitions,
            partial(ours, one, 1),
            partial(ours, many, GROUPS_PER_TICKET),
            partial(stock_jobs_per_s, running.url, stock),
        )
        waiting = take_turns(repetitions, partial(groups_per_s, running.url, "HalfASecond", IN_FLIGHT, slow, 1))[0]
    stock_detail = {"rq_jobs_per_s": median(simple)}
    return [
        Result(
            name="tickets-1",
            what=f"no-op jobs through our worker, one group a ticket, {IN_FLIGHT_NO_OP} in flight, against RQ's own",
            unit="times",
            target=3.0,
            better="higher",
            values=ratios(single, simple),
            details={"rollq_groups_per_s": median(single)} | stock_detail,
        ),
        Result(
            name=f"tickets-{GROUPS_PER_TICKET}",
            what=f"the same with {GROUPS_PER_TICKET} groups a ticket, per group",
            unit="times",
            target=20.0,
            better="higher",
            values=ratios(batched, simple),
            details={"rollq_groups_per_s": median(batched)} | stock_detail,
        ),
        Result(
            name="in-flight",
            what=f"{slow:,} groups that take 0.5 s each, at {IN_FLIGHT} in flight in one worker",
            unit="groups/s",
            target=400.0,
            better="higher",
            values=waiting,
            details={"possible_groups_per_s": IN_FLIGHT / 0.5},
        ),
    ]


def groups_per_s(url: str, loop: str, in_flight: int, groups: int, groups_per_ticket: int) -> float:
    """Groups per second, from first lease to last put, when `groups` groups are waiting for one worker process."""
    name = f"tickets-{secrets.token_hex(4)}"
    task = WorkerTask(
        batch_groups=IN_FLIGHT,
        group_size=1,
        max_staleness=100,
        agent_loop=f"benchmarks.jobs.{loop}",
    )
    with run(url, name, task) as (buffer, epoch):
        for first in range(0, groups, MAX_IDS_PER_CALL):
            count = min(MAX_IDS_PER_CALL, groups - first)
            prompts = [(Prompt("0", answer="1", ids=(0,)), first + i + 1) for i in range(count)]
            buffer.admit(TASK, prompts, epoch=epoch.epoch, cursor=first, target=groups, step=1)
        queue = open_queue(url, name)
        enqueue_tickets(queue, name, tickets_missing(groups, 0, groups_per_ticket), groups_per_ticket)
        queue.connection.close()
        with process(serve, url, name, task, in_flight):
            client, keys = buffer.client, task_keys(name, TASK)
            return groups / duration_s(
                lambda: client.zcard(keys.status(Status.COMPLETED)) >= groups,
                started=lambda: client.zcard(keys.status(Status.PENDING)) < groups,
            )


def stock_jobs_per_s(url: str, jobs: int) -> float:
    """Jobs per second, from first to last, when `jobs` empty jobs are waiting for one process of RQ's SimpleWorker."""
    with redis.Redis.from_url(url) as client:
        queue = Queue(f"stock-{secrets.token_hex(4)}", connection=client)
        queue.enqueue_many([Queue.prepare_data(empty_job) for _ in range(jobs)])
        with process(serve_stock, url, queue.name):
            return jobs / duration_s(
                lambda: len(queue.finished_job_registry) >= jobs, started=lambda: len(queue) < jobs
            )


def duration_s(done: Callable[[], bool], *, started: Callable[[], bool]) -> float:
    """Seconds from when `started` first returns True until `done` does; both are polled."""
    deadline = time.monotonic() + PATIENCE_S
    started_s = None
    while time.monotonic() < deadline:
        if started_s is None and started():
            started_s = time.perf_counter()
        if started_s is not None and done():
            return time.perf_counter() - started_s
        time.sleep(POLL_S)
    raise RuntimeError(f"the worker did not finish within {PATIENCE_S:g} s")


@contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[None]:
    """Run a worker process, and end it with SIGTERM."""
    worker = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
    worker.start()
    try:
        yield
    finally:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGTERM)
        worker.join(timeout=20)
        worker.kill()
        worker.join()


def serve(url: str, name: str, task: WorkerTask, in_flight: int) -> None:
    """Run rollq's worker."""
    settings = WorkerSettings(engine="simulated", samples_in_flight=in_flight, grace_s=0)
    with Buffer.connect(url, name) as buffer:
        run_worker(buffer, open_queue(url, name), {TASK: task}, settings)


def serve_stock(url: str, queue: str) -> None:
    """Run RQ's fastest worker, which does not fork."""
    logging.getLogger("rq.worker").setLevel(logging.WARNING)
    with redis.Redis.from_url(url) as client:
        SimpleWorker([Queue(queue, connection=client)], connection=client).work(logging_level="WARNING")
