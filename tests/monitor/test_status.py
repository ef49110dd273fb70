import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import FencedError
from rollq.buffer.replies import Control
from rollq.buffer.rollouts import Prompt
from rollq.buffer.settings import TaskRules
from rollq.buffer.tickets import enqueue_tickets, open_queue
from rollq.monitor.rq_info import rq_lines
from rollq.monitor.status import RunStatus, as_json, as_table, read_status


@pytest.fixture
def buffer(server_url: str, run_name: str) -> Iterator[Buffer]:
    with Buffer.connect(server_url, run_name) as buffer:
        buffer.create_run()
        for task in ("math", "code"):
            buffer.register_task(task, TaskRules(batch_groups=4))
        yield buffer


def look(buffer: Buffer, url: str) -> RunStatus:
    return read_status(buffer, open_queue(url, buffer.run))


def test_a_run_that_nobody_trains_yet_says_so(buffer: Buffer, server_url: str) -> None:
    text = as_table(look(buffer, server_url))
    assert "no weights published yet; 0 tickets queued" in text
    assert "no worker has reported lately" in text


def test_groups_tickets_weights_and_workers_are_shown(buffer: Buffer, server_url: str) -> None:
    buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri="none", digest="abcdef0123456789")
    buffer.admit("math", [(Prompt("p"), i + 1) for i in range(3)], epoch=1, cursor=0, target=8, step=1)
    buffer.report_worker("worker-1", {"version": 0, "tokens_per_s": 1234.5678, "pid": 17})
    enqueue_tickets(open_queue(server_url, buffer.run), buffer.run, 2, 1)
    found = look(buffer, server_url)
    lines = as_table(found).splitlines()
    assert lines[0] == f"run {buffer.run}: weights version 0 (epoch 1, abcdef012345); 2 tickets queued"
    assert [line.split()[:4] for line in lines[2:5]] == [
        ["task", "step", "ready", "pending"],
        ["code", "1", "0/4", "0"],
        ["math", "1", "0/4", "3"],
    ]
    assert lines[-2].split() == ["worker", "version", "tokens_per_s", "age_s"]
    assert lines[-1].split()[:3] == ["worker-1", "0", "1,234.6"]
    assert len({len(line) for line in lines[2:5]}) == 1


def test_the_last_error_of_a_task_is_shown_with_its_age(buffer: Buffer, server_url: str) -> None:
    buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri="none", digest="abcdef0123456789")
    buffer.admit("math", [(Prompt("p"), 1)], epoch=1, cursor=0, target=8, step=1)
    found = buffer.lease(["math"], 1, worker="w", version=0, epoch=1)
    buffer.hand_back(found.leases, counted=True, error="Traceback:\nValueError: no reward " + "x" * 2000)
    status = look(buffer, server_url)
    (line,) = [line for line in as_table(status).splitlines() if "last error" in line]
    assert re.fullmatch(r"task math: last error \(\d+ s ago\): Traceback: ValueError: no reward x+\.\.\.", line)
    assert len(line) < 340
    code, math = orjson.loads(as_json(status))["tasks"]
    assert code["last_error"] is None
    assert math["last_error"]["text"].startswith("Traceback:\nValueError: no reward")
    assert math["last_error"]["age_s"] >= 0


def test_a_worker_that_refuses_weights_says_why(buffer: Buffer, server_url: str) -> None:
    buffer.report_worker("worker-1", {"version": 0, "refused_weights": None})
    buffer.report_worker("worker-2", {"version": 0, "refused_weights": "weights of version 1 refused: too large"})
    lines = as_table(look(buffer, server_url)).splitlines()
    assert lines[-1] == "worker-2: weights of version 1 refused: too large"
    assert lines[-2].startswith("worker-2")


def test_the_trainers_last_step_is_shown_with_its_mismatch(buffer: Buffer, server_url: str) -> None:
    held = buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri="none", digest="d")
    assert "trainer" not in as_table(look(buffer, server_url))
    mismatch: dict[str, Any] = {
        "mean": 0.00123,
        "p99": 0.01,
        "max": 0.5,
        "kl": 1e-6,
        "effective_sample_size": None,
        "by_worker": {},
    }
    buffer.report_trainer(held, {"step": 7, "reward": 0.25, "mismatch": mismatch})
    found = look(buffer, server_url)
    (line,) = [line for line in as_table(found).splitlines() if line.startswith("trainer: ")]
    assert line == (
        "trainer: trained step 7 0 s ago; reward 0.250; mismatch with the engines: mean 0.0012, p99 0.01, "
        "max 0.5, kl 1e-06, effective_sample_size -"
    )
    assert orjson.loads(as_json(found))["trainer"]["mismatch"]["by_worker"] == {}


def test_a_trainer_that_was_replaced_reports_no_more(buffer: Buffer, server_url: str) -> None:
    held = buffer.begin_epoch(trainer_id="t", launch_id="first", from_step=0, uri="none", digest="d")
    buffer.begin_epoch(trainer_id="t", launch_id="second", from_step=0, uri="none", digest="d")
    with pytest.raises(FencedError):
        buffer.report_trainer(held, {"step": 7})
    assert look(buffer, server_url).trainer is None


def test_a_custom_trainer_reports_what_it_likes(buffer: Buffer, server_url: str) -> None:
    held = buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri="none", digest="d")
    buffer.report_trainer(held, {"loss": 1.5, "mismatch": "unknown", "reward": None})
    assert "trainer: reported 0 s ago" in as_table(look(buffer, server_url)).splitlines()


def test_the_size_of_the_step_trained_next_is_shown(buffer: Buffer, server_url: str) -> None:
    buffer.register_task("art", TaskRules(batch_groups=4, schedule=((1, 6), (9, 2))))
    buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri="none", digest="d")
    found = look(buffer, server_url)
    assert "0/6" in as_table(found).splitlines()[3].split()
    assert found.tasks[0].batch_groups == 6


def test_a_task_that_does_not_produce_says_why(buffer: Buffer, server_url: str) -> None:
    buffer.set_control("math", Control.STOPPED, "2 of 64 groups kept")
    buffer.set_control("code", Control.PAUSE, "")
    found = look(buffer, server_url)
    lines = [line for line in as_table(found).splitlines() if " is set to " in line]
    assert lines == ["task code is set to 'pause'", "task math is set to 'stopped': 2 of 64 groups kept"]
    assert orjson.loads(as_json(found))["tasks"][1]["control_reason"] == "2 of 64 groups kept"


def test_json_holds_the_same_as_plain_values(buffer: Buffer, server_url: str) -> None:
    buffer.report_worker("worker-1", {"version": 0})
    data = orjson.loads(as_json(look(buffer, server_url)))
    assert data["run"] == buffer.run
    assert data["model"] is None
    assert [task["task"] for task in data["tasks"]] == ["code", "math"]
    assert data["tasks"][0]["statuses"]["pending"] == 0
    assert data["tasks"][0]["progress"]["cursor"] == 0
    assert data["workers"]["worker-1"]["version"] == 0


def test_rqs_view_counts_tickets_and_loads_nothing(server_url: str, run_name: str) -> None:
    queue = open_queue(server_url, run_name)
    enqueue_tickets(queue, run_name, 3, 1)
    # a job whose data is a pickle, as anybody with access to the queue could plant it
    queue.connection.hset(f"rq:job:{run_name}", mapping={"data": b"\x80\x04cos\nsystem\n", "created_at": "x"})
    queue.connection.rpush(queue.key, run_name)
    assert rq_lines(queue) == [
        f"queue rollq-{run_name}: 4 queued, 0 executing, 0 finished, 0 failed",
        "no worker is registered",
    ]
