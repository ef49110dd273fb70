import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from redis import Redis
from rq import Queue, Worker
from rq.worker import BaseWorker

from rollq.buffer.store.keys import RunKeys
from rollq.buffer.tickets import TicketJob, TicketSerializer
from rollq.cli.demo.settings import RUN
from support.demo_process import DemoProcess
from support.waiting import PATIENCE_S, wait_until

STEPS = 10
BATCH_GROUPS = 32
QUICK = ("--warm-up-steps", "1")


@pytest.fixture
def demos() -> Iterator[list[DemoProcess]]:
    started: list[DemoProcess] = []
    yield started
    for demo in started:
        demo.process.kill()
        demo.process.wait()


def nobody_listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def batch_of(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["tokens"], line["rewards"], line["samples"], line["workers"], line["staleness_tokens"]


@pytest.mark.long
def test_a_demo_whose_worker_server_and_trainer_are_killed_trains_every_group_once(
    tmp_path: Path, demos: list[DemoProcess]
) -> None:
    demo = DemoProcess(tmp_path / "demo", "--steps", str(STEPS), *QUICK)
    demos.append(demo)
    demo.wait_until(lambda: len(demo.steps()) >= 1)
    with Redis(port=demo.ports()[0]) as connection:

        def all_workers() -> list[BaseWorker]:
            found: list[BaseWorker] = Worker.all(
                connection=connection, job_class=TicketJob, serializer=TicketSerializer
            )
            return found

        demo.wait_until(lambda: len(all_workers()) == 2)  # one may train the first step before the other has started
        workers = all_workers()
        assert {name for worker in workers for name in worker.queue_names()} == {RunKeys(RUN).queue()}
        queues = Queue.all(connection=connection, job_class=TicketJob, serializer=TicketSerializer)
        assert RunKeys(RUN).queue() in [queue.name for queue in queues]
        server_pid = connection.info("server")["process_id"]
    demo.kill_role("work")
    demo.wait_until(lambda: len(demo.steps()) >= 3)
    os.kill(server_pid, signal.SIGKILL)
    demo.wait_until(lambda: len(demo.steps()) >= 5)
    demo.kill_role("train")
    before = demo.metrics()
    assert demo.process.wait(PATIENCE_S) == 0, demo.text()

    assert demo.text().count("(SIGKILL) and was restarted") == 2
    assert "the server died and was restarted" in demo.text()
    after = demo.metrics()
    assert [line["step"] for line in after] == list(range(1, STEPS + 1))
    # What the dead trainer had claimed is served again, as it was; and every batch keeps to max_staleness.
    first = {line["step"]: line for line in before}
    for line in after:
        if line["step"] in first:
            assert batch_of(line) == batch_of(first[line["step"]])
    assert all(set(line["staleness_tokens"]) <= {"0", "1"} for line in (*before, *after))
    summary = orjson.loads((demo.folder / "summary.json").read_bytes())
    kept = summary["conservation"]
    assert kept["admitted"] == kept["archived"] + kept["in_buffer"] + sum(kept["dropped"].values())
    assert kept["archived"] + kept["dropped"].get("trained", 0) == STEPS * BATCH_GROUPS
    assert len(summary["samples_by_worker"]) >= 2
    assert set(summary["held_out"]) == {"before", "after"}
    assert (demo.folder / "report" / "index.html").exists()
    wait_until(lambda: demo.pids() == [])
    assert all(nobody_listens(port) for port in demo.ports())


@pytest.mark.slow  # tests/cli/up has the same
@pytest.mark.parametrize(
    ("moment", "signals"),
    [
        (lambda demo: "warm-up:" in demo.text(), 1),
        (lambda demo: len(demo.steps()) > 0, 2),
    ],
    ids=["while the model is made", "while it trains, twice"],
)
def test_ctrl_c_ends_a_demo_and_leaves_nothing(
    moment: Callable[[DemoProcess], bool], signals: int, tmp_path: Path, demos: list[DemoProcess]
) -> None:
    demo = DemoProcess(tmp_path / "demo", *QUICK, "--workers", "1")
    demos.append(demo)
    demo.wait_until(lambda: moment(demo))
    for _ in range(signals):
        demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(PATIENCE_S) == 130, demo.text()
    assert "stopped; the files so far are in" in demo.text()
    wait_until(lambda: demo.pids() == [])
    assert all(nobody_listens(port) for port in demo.ports())


@pytest.mark.slow  # tests/cli/up has the same
def test_a_demo_that_is_killed_takes_its_processes_along(tmp_path: Path, demos: list[DemoProcess]) -> None:
    demo = DemoProcess(tmp_path / "demo", *QUICK, "--workers", "1")
    demos.append(demo)
    demo.wait_until(lambda: len(demo.role_pids("work")) == 1)
    demo.process.kill()
    demo.process.wait()
    wait_until(lambda: demo.pids() == [])
