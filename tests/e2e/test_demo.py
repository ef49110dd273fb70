import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from demo_process import DemoProcess, eventually
from redis import Redis
from rq import Queue, Worker

from rollq.buffer.keys import RunKeys
from rollq.buffer.tickets import TicketJob, TicketSerializer
from rollq.cli.demo_settings import RUN

STEPS = 24
BATCH_GROUPS = 32
QUICK = ("--warm-up-steps", "20", "--minutes", "3")


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


def test_a_demo_whose_worker_and_trainer_are_killed_trains_every_group_once(
    tmp_path: Path, demos: list[DemoProcess]
) -> None:
    demo = DemoProcess(tmp_path / "demo", "--steps", str(STEPS), *QUICK)
    demos.append(demo)
    demo.wait_until(lambda: len(demo.steps()) >= 4)
    with Redis(port=demo.port()) as connection:
        workers = Worker.all(connection=connection, job_class=TicketJob, serializer=TicketSerializer)
        assert len(workers) == 2
        assert {name for worker in workers for name in worker.queue_names()} == {RunKeys(RUN).queue()}
        queues = Queue.all(connection=connection, job_class=TicketJob, serializer=TicketSerializer)
        assert RunKeys(RUN).queue() in [queue.name for queue in queues]
    demo.kill_role("work")
    demo.wait_until(lambda: len(demo.steps()) >= 8)
    demo.kill_role("train")
    assert demo.process.wait(120) == 0, demo.text()

    assert "(SIGKILL) and was started again" in demo.text()
    steps = demo.steps()
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert all(set(step.staleness_tokens) <= {0, 1} for step in steps)
    summary = orjson.loads((demo.folder / "summary.json").read_bytes())
    kept = summary["conservation"]
    assert kept["admitted"] == kept["archived"] + kept["in_buffer"] + sum(kept["dropped"].values())
    assert kept["archived"] + kept["dropped"].get("trained", 0) == STEPS * BATCH_GROUPS
    assert len(summary["samples_by_worker"]) == 3
    assert set(summary["held_out"]) == {"before", "after"}
    assert (demo.folder / "report" / "index.html").exists()
    eventually(lambda: demo.pids() == [])
    assert nobody_listens(demo.port())


@pytest.mark.parametrize(
    ("moment", "signals"),
    [("warm-up:", 1), ("by hand:", 2), ("step 2/", 1)],
    ids=["while the model is made", "while the roles start, twice", "while it trains"],
)
def test_ctrl_c_ends_a_demo_within_five_seconds_and_leaves_nothing(
    moment: str, signals: int, tmp_path: Path, demos: list[DemoProcess]
) -> None:
    demo = DemoProcess(tmp_path / "demo", *QUICK)
    demos.append(demo)
    demo.wait_until(lambda: moment in demo.text())
    for _ in range(signals):
        demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(5) == 130
    assert "stopped; what was made so far lies in" in demo.text()
    eventually(lambda: demo.pids() == [])
    assert nobody_listens(demo.port()) if "redis://" in demo.text() else True


def test_a_demo_that_is_killed_takes_its_processes_along(tmp_path: Path, demos: list[DemoProcess]) -> None:
    demo = DemoProcess(tmp_path / "demo", *QUICK)
    demos.append(demo)
    demo.wait_until(lambda: len(demo.role_pids("work")) == 2)
    demo.process.kill()
    demo.process.wait()
    eventually(lambda: demo.pids() == [])
