"""The RQ side of a worker, against a real server and real RQ."""

import asyncio
import gc
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from rq import Queue, Worker
from rq.command import send_command, send_shutdown_command, send_stop_job_command
from rq.job import Callback, JobStatus
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend

from rollq.buffer.errors import StoreLost
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.tickets import Ticket, TicketJob, TicketSerializer, enqueue_tickets, open_queue
from rollq.workers.rq.in_flight import Taken
from rollq.workers.rq.ticket_source import BLOCK_S
from rollq.workers.rq.worker import RqWorker, incarnation_name, short_host
from rollq.workers.settings import WorkerSettings
from support.proxy import Fate, Proxy, Verdict, name_of
from support.waiting import PATIENCE_S


class Order:
    """One ticket's work: held until the test lets go."""

    def __init__(self, work: "Work", groups: Sequence[str]) -> None:
        self.work = work
        self.groups = groups

    async def run(self) -> None:
        self.work.running += 1
        self.work.most_running = max(self.work.most_running, self.work.running)
        try:
            await self.work.gate.wait()
            if self.work.error is not None:
                raise self.work.error
            self.work.done.extend(self.groups)
        except asyncio.CancelledError:
            self.work.given_back.extend(self.groups)
            raise
        finally:
            self.work.running -= 1
            self.work.in_hand -= len(self.groups)


class Work:
    """A `TicketHandler` that makes up groups."""

    def __init__(self, room: int = 1000, *, held: bool = False, error: Exception | None = None) -> None:
        self.capacity = room
        self.error = error
        self.gate = asyncio.Event()
        if not held:
            self.gate.set()
        self.taken: list[str] = []
        self.done: list[str] = []
        self.given_back: list[str] = []
        self.in_hand = self.running = self.most_running = 0
        self.stopped = asyncio.Event()

    async def room(self) -> int:
        while not self.stopped.is_set():
            if (free := self.capacity - self.in_hand) > 0:
                return free
            await asyncio.sleep(0.01)
        return 0

    async def take(self, tickets: Sequence[Ticket]) -> Taken:
        orders, unused = [], 0
        for ticket in tickets:
            groups = min(ticket.groups, self.capacity - self.in_hand)
            unused += ticket.groups - groups
            names = [f"math/{len(self.taken) + index}" for index in range(groups)]
            self.taken.extend(names)
            self.in_hand += groups
            orders.append(Order(self, names))
        return Taken(orders, unused)

    def stop(self) -> None:
        self.stopped.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def serve(
    queue: Queue, run: str, work: Callable[[], Work], scene: Callable[[RqWorker, Work], Awaitable[None]]
) -> tuple[RqWorker, Work]:
    """Run a worker while `scene` plays, then stop it."""

    async def play() -> tuple[RqWorker, Work]:
        its_work = work()
        worker = RqWorker(queue, run, its_work, name=incarnation_name("worker"), grace_s=PATIENCE_S)
        serving = asyncio.create_task(worker.run())
        try:
            await scene(worker, its_work)
        finally:
            if not serving.done() and not its_work.stopped.is_set():
                worker.request_shutdown()
            await asyncio.wait_for(serving, PATIENCE_S)
        return worker, its_work

    return asyncio.run(play())


@pytest.fixture
def queue(server_url: str, run_name: str) -> Queue:
    return open_queue(server_url, run_name)


def status_of(queue: Queue, job_id: str) -> JobStatus:
    return TicketJob.fetch(job_id, connection=queue.connection, serializer=TicketSerializer).get_status()


def failure_of(queue: Queue, job_id: str) -> str:
    result = TicketJob.fetch(job_id, connection=queue.connection, serializer=TicketSerializer).latest_result()
    assert result is not None
    return result.exc_string or ""


def test_many_tickets_run_at_once_in_one_worker(queue: Queue, run_name: str) -> None:
    enqueue_tickets(queue, run_name, 200, 2)

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: work.running == 200)
        work.gate.set()
        await until(lambda: len(work.done) == 400)

    serve(queue, run_name, lambda: Work(held=True), scene)
    assert queue.count == 0
    assert queue.started_job_registry.get_job_ids() == []
    assert queue.intermediate_queue.get_job_ids() == []
    assert len(queue.finished_job_registry.get_job_ids()) == 200


def test_a_suspended_worker_takes_no_tickets_until_it_is_resumed(
    fresh_server: EmbeddedServer, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = open_queue(fresh_server.url, run_name)
    suspend(queue.connection)
    enqueue_tickets(queue, run_name, 3, 2)

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: "takes no tickets until `rq resume`" in caplog.text)
        await asyncio.sleep(2 * BLOCK_S)
        assert work.taken == []
        assert len(queue) == 3
        resume(queue.connection)
        await until(lambda: len(work.done) == 6)

    serve(queue, run_name, Work, scene)


def test_no_more_tickets_are_popped_than_there_is_room_for(queue: Queue, run_name: str) -> None:
    enqueue_tickets(queue, run_name, 50, 1)

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: len(work.done) == 50)

    _, work = serve(queue, run_name, lambda: Work(room=4), scene)
    assert work.most_running <= 4


def test_tickets_that_do_not_fit_stay_in_the_queue_in_order(queue: Queue, run_name: str) -> None:
    enqueue_tickets(queue, run_name, 2, 1)
    large = enqueue_tickets(queue, run_name, 3, 8)

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: work.taken == [f"math/{i}" for i in range(10)])
        await until(lambda: queue.job_ids == large[1:])
        work.gate.set()
        await until(lambda: len(work.done) == 26)

    serve(queue, run_name, lambda: Work(room=10, held=True), scene)


def test_tickets_that_were_not_used_go_back_as_they_are(queue: Queue, run_name: str) -> None:
    jobs = enqueue_tickets(queue, run_name, 3, 1)

    class Full(Work):
        """Has room when it is asked, and none left when tickets come."""

        async def take(self, tickets: Sequence[Ticket]) -> Taken:
            self.capacity = 0
            return await super().take(tickets)

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: work.capacity == 0)
        await until(lambda: queue.job_ids == jobs)

    serve(queue, run_name, lambda: Full(room=3), scene)
    assert queue.job_ids == jobs
    assert queue.intermediate_queue.get_job_ids() == []
    assert queue.finished_job_registry.get_job_ids() == []


def test_rq_sees_the_worker_its_job_and_the_groups_it_took(queue: Queue, run_name: str, server_url: str) -> None:
    job_id = enqueue_tickets(queue, run_name, 1, 3)[0]
    seen: list[str] = []

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: job_id in queue.started_job_registry)
        seen.extend(found.name for found in Worker.all(queue=queue))
        job = TicketJob.fetch(job_id, connection=queue.connection, serializer=TicketSerializer)
        assert job.worker_name == worker.name
        assert job.meta == {"groups": ["math/0", "math/1", "math/2"]}
        look = [sys.executable, "-m", "rq.cli", "info", "-u", server_url, "-W"]
        look += ["-j", "rollq.buffer.tickets.TicketJob", "-S", "rollq.buffer.tickets.TicketSerializer"]
        output = await asyncio.to_thread(subprocess.run, look, capture_output=True, text=True, check=True)
        assert worker.name in output.stdout
        assert queue.name in output.stdout
        work.gate.set()

    worker, _ = serve(queue, run_name, lambda: Work(held=True), scene)
    assert seen == [worker.name]
    assert Worker.all(queue=queue) == []
    assert status_of(queue, job_id) is JobStatus.FINISHED


def test_a_worker_that_was_killed_does_not_block_the_name_of_its_successor() -> None:
    names = {incarnation_name("gpu-0") for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("gpu-0-") for name in names)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("gpu-node-2", "gpu-node-2"),
        ("gpu2.cluster.local", "gpu2"),
        ("a" * 40, "a" * 32),
        ("rack 3/é", "rack-3--"),
        ("", "worker"),
    ],
)
def test_a_worker_without_a_name_has_the_hosts(monkeypatch: pytest.MonkeyPatch, host: str, name: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert WorkerSettings(name=short_host()).name == name


@pytest.mark.parametrize("cut", [b"EXEC", b"SETINFO"], ids=["registration", "subscription"])
def test_a_worker_starts_while_connections_break(server: EmbeddedServer, run_name: str, cut: bytes) -> None:
    """Also where the server has done what it was asked, and only its reply is lost."""
    was_registered = threading.Event()
    left = iter(range(4))

    def judge(command: bytes) -> Verdict:
        later = was_registered.is_set() or cut == b"EXEC"
        if name_of(command) == b"EXEC":
            was_registered.set()
        return Verdict(Fate.DROP) if later and cut in command and next(left, None) is not None else Verdict()

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: subscribers(worker) == 1)
        assert [found.name for found in Worker.all(queue=direct)] == [worker.name]
        send_shutdown_command(direct.connection, worker.name)
        await asyncio.wait_for(work.stopped.wait(), PATIENCE_S)

    def subscribers(worker: RqWorker) -> int:
        ((_, count),) = direct.connection.pubsub_numsub(worker.pubsub_channel_name)
        return int(count)

    direct = open_queue(server.url, run_name)
    with Proxy(urlsplit(server.url).port or 0, judge) as proxy:
        serve(open_queue(proxy.url, run_name), run_name, Work, scene)
        assert proxy.broken == 4
    assert Worker.all(queue=direct) == []


def test_a_worker_that_cannot_register_yet_stops_when_asked(server: EmbeddedServer, run_name: str) -> None:
    def judge(command: bytes) -> Verdict:
        return Verdict(Fate.LOSE) if b"birth" in command else Verdict()

    with Proxy(urlsplit(server.url).port or 0, judge) as proxy:

        async def scene(worker: RqWorker, work: Work) -> None:
            await until(lambda: proxy.broken > 0)
            worker.request_shutdown()

        serve(open_queue(proxy.url, run_name), run_name, Work, scene)
    assert Worker.all(queue=open_queue(server.url, run_name)) == []


def test_planted_jobs_are_refused_and_never_executed(queue: Queue, run_name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    command = f"touch {canary}"

    class Planted:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (command,)

    json_queue = Queue(queue.name, connection=queue.connection, serializer=JSONSerializer)
    pickle_queue = Queue(queue.name, connection=queue.connection)
    planted = [
        json_queue.enqueue("os.system", command, on_failure=Callback("os.system")),
        json_queue.enqueue("rollq.generate", run=run_name, groups=0),
        json_queue.enqueue("rollq.generate", run="another", groups=1),
        pickle_queue.enqueue("os.system", command),
        pickle_queue.enqueue("os.system", args=(Planted(),)),
    ]
    queue.connection.hset(planted[1].key, "meta", pickle.dumps(Planted()))
    enqueue_tickets(queue, run_name, 1, 1)

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: len(work.done) == 1 and queue.failed_job_registry.count == len(planted))

    serve(queue, run_name, Work, scene)
    assert not canary.exists()
    assert set(queue.failed_job_registry.get_job_ids()) == {job.id for job in planted}
    assert "'os.system', which is not allowed" in failure_of(queue, planted[0].id)
    assert "run 'another'" in failure_of(queue, planted[2].id)
    assert "not a ticket in orjson" in failure_of(queue, planted[4].id)


def test_what_is_not_even_a_job_is_dropped(queue: Queue, run_name: str) -> None:
    queue.connection.rpush(queue.key, "../x", b"\xff\xfe", "gone")
    queue.connection.hset(TicketJob.key_for("torn"), mapping={"data": b"x", "status": "no such status"})
    queue.connection.rpush(queue.key, "torn")
    enqueue_tickets(queue, run_name, 1, 1)

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: len(work.done) == 1 and "torn" in queue.failed_job_registry)

    serve(queue, run_name, Work, scene)
    assert queue.intermediate_queue.get_job_ids() == []


@pytest.mark.parametrize("together", [True, False], ids=["in one pop", "while the first copy runs"])
def test_a_ticket_that_was_enqueued_twice_is_worked_off_once(queue: Queue, run_name: str, together: bool) -> None:
    (job_id,) = enqueue_tickets(queue, run_name, 1, 1)
    if together:
        queue.push_job_id(job_id)

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: work.running == 1)
        if not together:
            queue.push_job_id(job_id)
        other = enqueue_tickets(queue, run_name, 1, 1)[0]
        await until(lambda: work.running == 2)
        work.gate.set()
        await until(lambda: {job_id, other} <= set(queue.finished_job_registry.get_job_ids()))

    _, work = serve(queue, run_name, lambda: Work(held=True), scene)
    assert len(work.done) == 2
    assert queue.connection.lrange(queue.intermediate_queue_key, 0, -1) == []
    assert queue.started_job_registry.count == 0


def test_a_failing_ticket_is_filed_with_its_traceback_and_harms_no_other(queue: Queue, run_name: str) -> None:
    job_id = enqueue_tickets(queue, run_name, 1, 1)[0]

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: job_id in queue.failed_job_registry)
        work.error = None
        enqueue_tickets(queue, run_name, 1, 1)
        await until(lambda: len(work.done) == 1)

    serve(queue, run_name, lambda: Work(error=RuntimeError("the GPU is on fire")), scene)
    assert "RuntimeError: the GPU is on fire" in failure_of(queue, job_id)


def test_stop_job_stops_that_ticket_alone_and_its_groups_are_given_back(queue: Queue, run_name: str) -> None:
    first, second = enqueue_tickets(queue, run_name, 2, 1)

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: first in queue.started_job_registry and second in queue.started_job_registry)
        send_stop_job_command(queue.connection, first, serializer=TicketSerializer)
        await until(lambda: first in queue.failed_job_registry)
        assert work.given_back == ["math/0"]
        work.gate.set()

    _, work = serve(queue, run_name, lambda: Work(held=True), scene)
    assert status_of(queue, first) is JobStatus.STOPPED
    assert status_of(queue, second) is JobStatus.FINISHED
    assert work.done == ["math/1"]


def channel(worker: RqWorker) -> bytes:
    name: str = worker.pubsub_channel_name
    return name.encode()


def test_shutdown_command_ends_the_worker_and_nonsense_is_ignored(queue: Queue, run_name: str) -> None:
    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: dict(queue.connection.pubsub_numsub(worker.pubsub_channel_name)) == {channel(worker): 1})
        queue.connection.publish(worker.pubsub_channel_name, "not json")
        send_command(queue.connection, worker.name, "kill-horse")
        send_command(queue.connection, worker.name, "stop-job", job_id="unknown")
        send_shutdown_command(queue.connection, worker.name)
        await until(work.stopped.is_set)

    serve(queue, run_name, Work, scene)


def test_sigterm_lets_tickets_finish_and_pops_no_new_ones(queue: Queue, run_name: str) -> None:
    enqueue_tickets(queue, run_name, 3, 1)

    async def scene(worker: RqWorker, work: Work) -> None:
        worker.install_signals(lambda: None)
        await until(lambda: work.running == 3)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(work.stopped.is_set)
        enqueue_tickets(queue, run_name, 1, 1)
        work.gate.set()

    _, work = serve(queue, run_name, lambda: Work(room=10, held=True), scene)
    assert len(work.done) == 3
    assert queue.count == 1


def test_second_signal_gives_everything_back_at_once(queue: Queue, run_name: str) -> None:
    enqueue_tickets(queue, run_name, 3, 1)

    async def scene(worker: RqWorker, work: Work) -> None:
        worker.install_signals(lambda: None)
        await until(lambda: work.running == 3)
        os.kill(os.getpid(), signal.SIGINT)
        await until(work.stopped.is_set)
        os.kill(os.getpid(), signal.SIGINT)

    _, work = serve(queue, run_name, lambda: Work(held=True), scene)
    assert work.done == []
    assert len(work.given_back) == 3
    assert queue.failed_job_registry.count == 0


def test_a_lost_store_stops_the_worker(queue: Queue, run_name: str) -> None:
    enqueue_tickets(queue, run_name, 1, 1)

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(work.stopped.is_set)

    with pytest.raises(StoreLost, match="gone"):
        serve(queue, run_name, lambda: Work(error=StoreLost("run is gone")), scene)


def test_a_worker_that_ends_while_its_server_is_away_stops_listening_for_commands(
    fresh_server: EmbeddedServer, run_name: str
) -> None:
    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: worker.pubsub_thread is not None)
        await asyncio.to_thread(fresh_server.stop)

    worker, _ = serve(open_queue(fresh_server.url, run_name), run_name, Work, scene)
    listening: Any = worker.pubsub_thread  # RQ types it as None
    listening.join(PATIENCE_S)
    assert not listening.is_alive()


def test_a_worker_that_ends_while_a_record_cannot_be_written_says_so_in_a_line(
    fresh_server: EmbeddedServer, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for the write any more: its error would be a traceback when the loop ends."""
    queue = open_queue(fresh_server.url, run_name)
    enqueue_tickets(queue, run_name, 1, 1)

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: work.running == 1)
        await asyncio.to_thread(fresh_server.stop)
        work.gate.set()
        await until(lambda: len(work.done) == 1)
        await until(lambda: "waiting for it" in caplog.text)

    with caplog.at_level(logging.WARNING):
        serve(queue, run_name, lambda: Work(held=True), scene)
        gc.collect()
    assert "RQ's records of 1 tickets are not written" in caplog.text
    assert "never retrieved" not in caplog.text


def test_worker_survives_a_restart_of_its_server(fresh_server: EmbeddedServer, run_name: str) -> None:
    queue = open_queue(fresh_server.url, run_name)
    enqueue_tickets(queue, run_name, 1, 1)

    async def scene(worker: RqWorker, work: Work) -> None:
        await until(lambda: work.running == 1)
        await asyncio.to_thread(fresh_server.stop)
        work.gate.set()
        await until(lambda: len(work.done) == 1)
        await asyncio.to_thread(fresh_server.start)
        enqueue_tickets(queue, run_name, 1, 1)
        await until(lambda: len(work.done) == 2 and len(queue.finished_job_registry.get_job_ids()) == 2)

    serve(queue, run_name, lambda: Work(held=True), scene)


@pytest.mark.long
@pytest.mark.parametrize("full_from", ["before it starts", "once it is registered"])
def test_tickets_are_worked_off_while_memory_is_full(
    fresh_server_of_each_kind: EmbeddedServer, run_name: str, full_from: str
) -> None:
    queue = open_queue(fresh_server_of_each_kind.url, run_name)
    enqueue_tickets(queue, run_name, 20, 1)
    if full_from == "before it starts":
        queue.connection.config_set("maxmemory", 1)

    async def scene(worker: RqWorker, work: Work) -> None:
        if full_from == "once it is registered":
            await until(lambda: Worker.count(queue=queue) == 1)
            queue.connection.config_set("maxmemory", 1)
        work.capacity = 1000
        await until(lambda: len(work.done) == 20)
        queue.connection.config_set("maxmemory", 0)
        job_id = enqueue_tickets(queue, run_name, 1, 1)[0]
        await until(lambda: job_id in queue.finished_job_registry)

    serve(queue, run_name, lambda: Work(room=0), scene)
