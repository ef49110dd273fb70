import os
import re
import socket
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.errors import FencedError
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.keys import task_keys
from rollq.buffer.tickets import enqueue_tickets, open_queue
from rollq.buffer.values.places import Place
from rollq.buffer.values.rollouts import Prompt
from rollq.monitor.status.read import RunStatus, batch_share, completed_report, read_status
from rollq.monitor.status.text import as_json, as_table
from rollq.monitor.status.trainer_words import MOST_ERROR


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
    assert text.splitlines()[:5] == [
        "starting: no trainer has started; nobody produces",
        "to do:",
        "  1. start the trainer: `rollq train`",
        "  2. start the producer: `rollq produce`",
        "  3. start a worker: `rollq work`",
    ]
    assert "no weights published yet; 0 tickets" in text
    assert "no worker has reported lately" in text


def test_groups_tickets_weights_and_workers_are_shown(buffer: Buffer, server_url: str) -> None:
    buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri="none", digest="abcdef0123456789")
    buffer.admit("math", [(Prompt("p"), i + 1) for i in range(3)], epoch=1, cursor=0, target=8, step=1)
    buffer.report_worker("worker-1", {"version": 0, "tokens_per_s": 1234.5678, "pid": 17})
    enqueue_tickets(open_queue(server_url, buffer.run), buffer.run, 2, 1)
    found = look(buffer, server_url)
    lines = as_table(found).splitlines()
    assert f"run {buffer.run}: version 0 (epoch 1); 2 tickets; 1 worker" in lines
    first = next(index for index, line in enumerate(lines) if line.startswith("task "))
    assert [line.split()[:7] for line in lines[first : first + 3]] == [
        ["task", "step", "reward", "length", "ready", "bound", "pending"],
        ["code", "1", "-", "-", "0/4", "0/8", "0"],
        ["math", "1", "-", "-", "0/4", "3/8", "3"],
    ]
    assert lines[-2].split() == ["worker", "version", "tokens/s", "age"]
    assert lines[-1].split()[:3] == ["worker-1", "0", "1,235"]
    assert len({len(line) for line in lines[first : first + 3]}) == 1


def test_the_last_error_of_a_task_is_shown_with_its_age(buffer: Buffer, server_url: str) -> None:
    buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri="none", digest="abcdef0123456789")
    buffer.admit("math", [(Prompt("p"), 1)], epoch=1, cursor=0, target=8, step=1)
    found = buffer.lease(["math"], 1, worker="w", version=0, epoch=1)
    buffer.hand_back(found.leases, counted=True, error="Traceback:\nValueError: no reward " + "x" * 2000)
    status = look(buffer, server_url)
    (line,) = [line for line in as_table(status).splitlines() if "last error" in line]
    assert re.fullmatch(r"math: last error \([\d.]+ m?s ago\): Traceback: ValueError: no reward", line), "then it wraps"
    assert as_table(status).count("x") < MOST_ERROR, "and is cut"
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
    mismatch: dict[str, Any] = {
        "mean": 0.00123,
        "p99": 0.01,
        "max": 0.5,
        "kl": 1e-6,
        "effective_sample_size": None,
        "by_worker": {},
    }
    buffer.renew_trainer(held)
    buffer.report_trainer(held, {"step": 7, "reward": 0.25, "mismatch": mismatch})
    found = look(buffer, server_url)
    text = " ".join(line.strip() for line in as_table(found, 300).splitlines() if line.startswith("trainer t: "))
    assert "trained step 7" in text
    assert text.endswith(
        "reward 0.250; mismatch with the engines: mean 0.0012, p99 0.01, max 0.5, kl 1e-06, effective_sample_size -"
    )
    assert orjson.loads(as_json(found))["trainer"]["report"]["mismatch"]["by_worker"] == {}


def test_a_trainer_that_was_replaced_reports_no_more(buffer: Buffer, server_url: str) -> None:
    held = buffer.begin_epoch(trainer_id="t", launch_id="first", from_step=0, uri="none", digest="d")
    buffer.begin_epoch(trainer_id="t", launch_id="second", from_step=0, uri="none", digest="d", takeover=True)
    with pytest.raises(FencedError):
        buffer.report_trainer(held, {"step": 7})
    trainer = look(buffer, server_url).trainer
    assert trainer is not None
    assert trainer.report is None


def test_a_custom_trainer_reports_what_it_likes(buffer: Buffer, server_url: str) -> None:
    held = buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri="none", digest="d")
    buffer.renew_trainer(held)
    buffer.report_trainer(held, {"loss": 1.5, "mismatch": "unknown", "reward": None})
    (line,) = [line for line in as_table(look(buffer, server_url)).splitlines() if line.startswith("trainer t: ")]
    assert line.split("; ")[-1].startswith("reported ")


def test_the_size_of_the_step_trained_next_is_shown(buffer: Buffer, server_url: str) -> None:
    buffer.register_task("art", TaskRules(batch_groups=4, schedule=((1, 6), (9, 2))))
    buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri="none", digest="d")
    found = look(buffer, server_url)
    (line,) = [line for line in as_table(found).splitlines() if line.startswith("art ") and "/" in line]
    assert line.split()[4] == "0/6"
    assert found.tasks[0].batch_groups == 6


def test_a_task_that_does_not_produce_says_why(buffer: Buffer, server_url: str) -> None:
    buffer.set_control("math", Control.STOPPED, "2 of 64 groups kept")
    buffer.set_control("code", Control.PAUSE, "")
    found = look(buffer, server_url)
    lines = [line for line in as_table(found).splitlines() if " set to '" in line]
    assert lines == ["code: set to 'pause'", "math: set to 'stopped': 2 of 64 groups kept"]
    assert orjson.loads(as_json(found))["tasks"][1]["control_reason"] == "2 of 64 groups kept"


def test_the_last_error_leaves_after_ten_minutes(buffer: Buffer, server_url: str) -> None:
    for age_s, is_shown in ((60, True), (610, False)):
        key, at_ms = task_keys(buffer.run, "math").prefix + "last_error", buffer.server_ms() - age_s * 1000
        buffer.send("HSET", key, "text", "ValueError: no number", "at_ms", at_ms)
        found = look(buffer, server_url)
        assert ("last error" in as_table(found)) is is_shown
        assert bool(orjson.loads(as_json(found))["tasks"][1]["last_error"]) is is_shown


def test_json_holds_the_same_as_plain_values(buffer: Buffer, server_url: str) -> None:
    buffer.report_worker("worker-1", {"version": 0})
    data = orjson.loads(as_json(look(buffer, server_url)))
    assert data["run"] == buffer.run
    assert data["model"] is None
    assert [task["task"] for task in data["tasks"]] == ["code", "math"]
    assert data["tasks"][0]["statuses"]["pending"] == 0
    assert data["tasks"][0]["progress"]["cursor"] == 0
    assert data["workers"]["worker-1"]["version"] == 0


def test_each_worker_has_its_share_of_the_last_trained_batch(buffer: Buffer, server_url: str) -> None:
    held = buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri="none", digest="d")
    for name in ("w1", "w2", "w3"):
        buffer.report_worker(name, {"state": "serving"})
    assert look(buffer, server_url).workers["w1"].get("batch_share") is None
    made = {"w1": 40, "w2": 20, "gone": 20}
    buffer.report_trainer(held, {"step": 1, "workers": made, "other_samples": 10, "inserted_samples": 10})
    buffer.renew_trainer(held)
    shares = {name: report.get("batch_share") for name, report in look(buffer, server_url).workers.items()}
    assert shares == {"w1": 0.4, "w2": 0.2, "w3": None}  # it may be one of the others
    buffer.report_trainer(held, {"step": 1, "workers": made})
    shares = {name: report.get("batch_share") for name, report in look(buffer, server_url).workers.items()}
    assert shares == {"w1": 0.5, "w2": 0.25, "w3": 0.0}


@pytest.mark.parametrize("workers", ["unknown", {}, {"w1": "many"}, {"w1": 0}, [3]])
def test_a_report_of_a_custom_trainer_that_means_something_else_has_no_shares(workers: object) -> None:
    assert batch_share({"workers": workers}, "w1") == {}


@pytest.mark.parametrize(
    ("report", "state"),
    [
        ({"state": "serving", "in_flight": 0, "samples_in_flight": 0}, "idle"),
        ({"state": "serving", "in_flight": 1}, "serving"),
        ({"state": "serving", "in_flight": 0, "samples_in_flight": 3}, "serving"),  # of a group of another worker
        ({"state": "paused", "in_flight": 0}, "paused"),
        ({}, None),
    ],
)
def test_a_worker_that_takes_groups_and_has_none_is_idle(report: dict[str, object], state: str | None) -> None:
    assert completed_report({**report, "age_s": 1.0}, {}).get("state") == state


def test_a_dead_worker_makes_no_tokens() -> None:
    assert completed_report({"tokens_per_s": 870.0, "age_s": 20.0}, {})["tokens_per_s"] == 870.0
    assert "tokens_per_s" not in completed_report({"tokens_per_s": 870.0, "age_s": 31.0}, {})


def test_a_worker_that_has_died_is_shown_as_dead(buffer: Buffer, server_url: str) -> None:
    for name, age_ms in (("here", 0), ("late", 15_000), ("gone", 60_000), ("long gone", 3_000_000)):
        report = b'{"state":"serving","in_flight":3,"samples_in_flight":20,"capacity":64}'
        buffer.send("HSET", buffer.keys.workers, name, b"%d %s" % (buffer.server_ms() - age_ms, report))
    found = look(buffer, server_url)
    assert [report["condition"] for report in found.workers.values()] == ["dead", "alive", "silent"]
    lines = as_table(found).splitlines()[-3:]
    assert [line.split()[:3] for line in lines] == [
        ["gone", "DEAD", "20/64"],
        ["late", "SILENT", "20/64"],
        ["here", "serving", "20/64"],
    ]
    assert list(found.alive_workers) == ["here"]


def test_producers_and_the_trainer_are_found_by_machine_and_process(buffer: Buffer, server_url: str) -> None:
    buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri="none", digest="d")
    here = Place(socket.gethostname(), os.getpid())
    buffer.reap("math", Place("other", 12, "0,1"))
    buffer.reap("math", here)
    buffer.reap("math")  # by another role
    buffer.send("HSET", task_keys(buffer.run, "math").producers, "no place", "now")
    found = look(buffer, server_url)
    code, math = found.tasks
    assert code.producers == ()
    assert {producer.place for producer in math.producers} == {Place("other", 12), here}
    assert found.trainer is not None
    assert found.trainer.place is not None
    assert str(found.trainer.place) == f"{here.host}, process {here.pid}"
    assert f"on {here} (seen " in " ".join(as_table(found).split())


def test_a_producer_that_comes_replaces_those_that_fell_silent(buffer: Buffer) -> None:
    key, now = task_keys(buffer.run, "math").producers, buffer.server_ms()
    buffer.send("HSET", key, "long gone", now - 61_000, "unreadable", "x", "just now", now)
    buffer.reap("math", Place("box", 1))
    assert buffer.send("HKEYS", key) == [b"just now", b'{"host":"box","pid":1}']


def test_the_history_gives_rates_and_the_state_of_production(buffer: Buffer, server_url: str) -> None:
    buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri="none", digest="d")
    buffer.reap("math")
    earlier, *rest = buffer.send("LINDEX", task_keys(buffer.run, "math").prefix + "history", 0).split(b",", 1)
    row = b",".join([b"%d" % (int(earlier) - 50_000), *rest])
    buffer.send("LSET", task_keys(buffer.run, "math").prefix + "history", 0, row)
    buffer.admit("math", [(Prompt("p"), i + 1) for i in range(3)], epoch=1, cursor=0, target=8, step=1)
    code, math = look(buffer, server_url).tasks
    assert code.rates is None
    assert code.producer_silent_s is None
    assert math.rates is not None
    assert math.rates.seconds >= 50
    assert (math.scheduled, math.limit, math.next_version) == (3, 8, 1)
    assert math.pending_age_s is not None


def test_jobs_are_counted_by_rqs_registries_and_never_loaded(buffer: Buffer, server_url: str, run_name: str) -> None:
    queue = open_queue(server_url, run_name)
    enqueue_tickets(queue, run_name, 3, 1)
    # a job whose data is a pickle, as anybody with access to the queue could plant it
    queue.connection.hset(f"rq:job:{run_name}", mapping={"data": b"\x80\x04cos\nsystem\n", "created_at": "x"})
    queue.connection.rpush(queue.key, run_name)
    assert f"run {run_name}: no weights published yet; 4 tickets; 0 workers" in as_table(look(buffer, server_url))
    queue.connection.zadd(queue.failed_job_registry.key, {run_name: 1})
    found = look(buffer, server_url)
    assert "; 4 tickets (1 failed by RQ); " in as_table(found)
    assert orjson.loads(as_json(found))["jobs"] == {"executing": 0, "finished": 0, "failed": 1}


def test_a_task_that_no_batch_takes_groups_of_is_retired_in_every_view(buffer: Buffer, server_url: str) -> None:
    buffer.change_rules("code", {"batch_groups": 0}, batch_step=1)
    found = look(buffer, server_url)
    assert {task.task: task.state for task in found.tasks} == {"code": "retired", "math": "run"}
    assert {task["task"]: task["state"] for task in orjson.loads(as_json(found))["tasks"]} == {
        "code": "retired", "math": "run"
    }  # fmt: skip
    text = " ".join(as_table(found).split())
    assert "code: retired: no batch takes its groups; `rollq set code batch_groups=N` brings it back" in text
    buffer.change_rules("code", {"batch_groups": 4}, batch_step=9)
    assert [task.state for task in look(buffer, server_url).tasks] == ["run", "run"], "a later batch has it"
