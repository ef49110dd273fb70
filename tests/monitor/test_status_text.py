"""The screen of `rollq status`, and its JSON."""

from dataclasses import replace

import orjson
import pytest

from rollq.buffer.calls.evaluations import EvaluationState
from rollq.buffer.calls.replies.prompts import Unusable
from rollq.buffer.calls.replies.tasks import LastError
from rollq.buffer.values.history import SeenProducer
from rollq.buffer.values.memory_use import Fullness
from rollq.buffer.values.places import Place
from rollq.buffer.values.rollouts import Status
from rollq.buffer.values.trainer_state import TrainerPhase
from rollq.monitor.status.text import STATUS_VERSION, as_json, as_json_line, as_table, reward_cell
from support.run_statuses import RATES, run_status, task_status, trainer_state, waiting, worker

BUSY = run_status(
    task_status(
        "code",
        {Status.COMPLETED: 3, Status.RUNNING: 13},
        rates=RATES,
        by_staleness={0: 2, 1: 1},
        dropped={"trained": 1200, "expired": 4, "reused": 0},
        failed_samples={"grader": 1200, "sandbox": 3},
        bytes={"completed": 4096},
        pending_age_s=None,
        running_age_s=75.0,
        ready_age_s=3.25,
        last_error=LastError("judge: ValueError: no number", 3.0),
        progress={"rows": 1000, "rows_read": 640, "rows_unusable": 12, "rows_too_long": 3},
        unusable={"not JSON": Unusable(12, "p.jsonl:3")},
        reward=0.12,
        response_tokens=512.4,
    ),
    task_status("math", {Status.COMPLETED: 16}, reward=0.8),
    workers={"worker-1-483c9254": worker(13), "worker-2-fb7dd6c4": worker(condition="dead", age_s=45.0)},
    trainer=waiting({"code": (3, 16)}, busy_s=2.0, waited_s=4.0, report={"step": 40, "age_s": 12.0, "reward": 0.5}),
    fullness=Fullness.of_memory(2**28, 2**30),
)


def test_the_lowest_reward_is_of_a_task_that_is_trained_and_not_of_equal_ones() -> None:
    low, high = task_status("code", reward=0.1), task_status("math", reward=0.8)
    assert [reward_cell(task, (low, high)) for task in (low, high)] == ["lowest 0.100", "0.800"]
    retired = replace(low, is_retired=True)
    assert [reward_cell(task, (retired, high)) for task in (retired, high)] == ["0.100", "0.800"]
    assert reward_cell(low, (low, replace(low, task="sort"))) == "0.100"


def test_the_diagnosis_is_the_first_line() -> None:
    assert (
        as_table(BUSY, 400).splitlines()[0].startswith("starving: 13 groups running on 1 of 2 workers; the trainer has")
    )


def test_every_fact_is_on_the_screen() -> None:
    lines = as_table(BUSY, 160).splitlines()
    words = [line.split() for line in lines]
    assert "run sums: version 40 (epoch 1); 0 tickets; 25% of maxmemory (256 MiB of 1.0 GiB); 1 of 2 workers" in lines
    assert ["code", "41", "lowest", "0.120", "512", "3/16", "16/32", "0", "13", "3"] in words
    assert ["math", "41", "0.800", "-", "16/16", "16/32", "0", "0", "16"] in words
    assert ["code", "4.00", "2,000", "4.00", "0.00", "90%", "1.0", "s", "8.0", "s", "2.0", "s"] in words
    assert ["math", "-", "-", "-", "-", "90%", "-", "-", "-"] in words
    assert ["code", "-", "75", "s", "3.2", "s", "0.5", "s", "ago"] in words
    assert "code: staleness of ready groups: 0: 2, 1: 1" in lines
    assert (
        "code: prompts: 640 of 1,000 rows read, 625 used, 12 unusable, 3 too long (12 x not JSON, first p.jsonl:3)"
        in lines
    )
    assert "code: so far: 1,200 groups trained, 4 groups expired" in lines
    assert "code: samples take 4 KiB (completed 4 KiB)" in lines
    assert "code: last error (3.0 s ago): judge: ValueError: no number" in lines
    first = next(index for index, row in enumerate(words) if row[:2] == ["worker", "process"]) + 1
    assert [" ".join(row) for row in words[first : first + 2]] == [
        "worker-2-fb7dd6c4 box:4242 simulated 40 DEAD 0/128 0 512 25% 7.5 s 0.2 s 700 0 45 s",
        "worker-1-483c9254 box:4242 simulated 40 serving 104/128 13 512 25% 7.5 s 0.2 s 700 0 0.4 s",
    ]
    trainer = " ".join(line.strip() for line in lines[lines.index("") + 2 :][:2]).strip()
    assert trainer == (
        "trainer: waiting, step 41 for 12 s; a step takes 2.0 s after a wait of 4.0 s; trained step 40 12 s ago; "
        "reward 0.500"
    )


@pytest.mark.parametrize("width", [80, 100])
def test_a_screen_of_a_usual_run_is_no_wider_than_asked(width: int) -> None:
    assert max(map(len, as_table(BUSY, width).splitlines())) <= width


def test_json_has_the_diagnosis_and_the_number_of_workers() -> None:
    run = replace(BUSY, tasks=(replace(BUSY.tasks[0], limit=100_000),))
    found = orjson.loads(as_json(run))
    assert found["schema"] == STATUS_VERSION == 2
    assert found["diagnosis"]["state"] == "starving"
    assert found["diagnosis"]["sentence"].startswith("13 groups running on 1 of 2 workers; the trainer has")
    assert found["diagnosis"]["level"] == "attention"
    assert found["wanted_workers"] == 5  # 16 groups x 500 tokens / 2 s / 0.9 kept / 1,000 tokens/s
    assert found["tasks"][0]["by_staleness"] == {"0": 2, "1": 1}
    assert found["tasks"][0]["rates"]["worked_s"] == 8
    assert found["trainer"]["wanted"] == {"code": 16}
    assert found["fullness"] == {
        "share": 0.25,
        "limit": "maxmemory",
        "is_full": False,
        "used_bytes": 2**28,
        "limit_bytes": 2**30,
    }
    assert found["workers"]["worker-2-fb7dd6c4"]["condition"] == "dead"


def test_samples_that_failed_are_named_by_the_part_that_failed() -> None:
    lines = as_table(BUSY, 400).splitlines()
    assert "code: failed samples: 1,200 grader, 3 sandbox" in lines
    assert not any(line.startswith("math: failed samples") for line in lines)


def test_groups_that_are_kept_to_look_at_are_no_depth() -> None:
    lines = as_table(run_status(task_status("math", {Status.RUNNING: 4, Status.FAILED: 97, Status.FILTERED: 3})), 400)
    assert "failed" not in next(line for line in lines.splitlines() if line.startswith("task "))
    assert "math: kept for inspection: 3 filtered, 97 failed" in lines.splitlines()


def test_evaluations_have_a_table_and_are_no_tasks() -> None:
    lines = as_table(
        run_status(
            task_status("math"),
            task_status("aime", kind="eval", evaluation=EvaluationState(True, 64, 12, 1, version=40, reward=0.625)),
            task_status("held_out", kind="eval"),
        ),
        400,
    ).splitlines()
    assert [line.split()[0] for line in lines[lines.index("") + 1 :] if "math" in line] == ["math"] * 3
    at = next(index for index, line in enumerate(lines) if line.startswith("evaluation "))
    assert [line.split() for line in lines[at : at + 3]] == [
        ["evaluation", "last", "step", "reward", "done", "failed", "state"],
        ["aime", "40", "0.625", "12/64", "1", "running"],
        ["held_out", "-", "-", "-", "-", "not", "yet"],
    ]
    assert sum("aime" in line for line in lines) == 1


def test_inserted_samples_of_the_last_batch_are_said() -> None:
    trainer = trainer_state(report={"step": 40, "age_s": 12.0, "workers": {"w1": 96}, "inserted_samples": 32})
    assert "32 samples of it inserted" in as_table(run_status(trainer=trainer), 400)


def test_every_role_is_shown_with_its_machine_and_process() -> None:
    seen = tuple(SeenProducer(Place("box", 100 + number), float(number)) for number in (4, 1, 3, 2))
    tasks = task_status("a", producers=seen[:2]), task_status("b", producers=seen)
    run = run_status(*tasks, trainer=trainer_state(place=Place("gpu-1", 7, "0,1")))
    text = as_table(run, 400)
    assert "trainer: training, step 41 for 12 s; on gpu-1, process 7, GPUs 0,1" in text
    shown = ", ".join(f"on box, process {100 + number} (seen {number}.0 s ago)" for number in (1, 2, 3))
    assert f"producers: {shown}, 1 more\n" in text
    found = orjson.loads(as_json(run))
    assert found["trainer"]["place"] == {"host": "gpu-1", "pid": 7, "gpus": "0,1"}
    assert found["tasks"][0]["producers"][1] == {"place": {"host": "box", "pid": 101, "gpus": ""}, "silent_s": 1.0}


def test_gpus_of_workers_are_a_column_where_there_are_any() -> None:
    assert "GPU" not in as_table(run_status(workers={"w": worker(gpus="")}), 200)
    (row,) = [
        line for line in as_table(run_status(workers={"w": worker(gpus="0,1")}), 200).splitlines() if "0,1" in line
    ]
    assert row.split()[:3] == ["w", "box:4242", "0,1"]


def test_json_is_on_one_line_where_lines_are_read() -> None:
    (line,) = as_json_line(BUSY).splitlines()
    assert orjson.loads(line) == orjson.loads(as_json(BUSY))


def test_a_trainer_that_has_not_been_heard_for_a_while_is_shown_by_what_it_did_then() -> None:
    text = as_table(replace(BUSY, trainer=trainer_state(silent_s=8.0, for_s=20.0)))
    assert "trainer: last heard 8.0 s ago, then training step 41\n" in text


def test_what_to_do_is_a_list_with_a_step_a_line_and_an_error_of_the_trainer_is_shown() -> None:
    stopped = task_status(control="stopped", control_reason="every one failed")
    failed = trainer_state(
        TrainerPhase.FAILED, error="ProductionStopped: no batch for step 41:\n  task 'math': failed 71"
    )
    lines = as_table(run_status(stopped, trainer=failed), 60).splitlines()
    at = lines.index("to do:")
    assert lines[at + 1 : at + 6] == [
        "  1. fix the cause",
        "  2. restart every worker: a running worker keeps its old",
        "     code and settings",
        "  3. let production continue: `rollq resume`",
        "  4. start the trainer again: `rollq train` continues from",
    ]
    assert "trainer's error: ProductionStopped: no batch for step 41:" in lines
    assert "run sums: version 40 (epoch 1); 0 tickets; 1 worker, with nothing to generate now" in as_table(
        run_status(stopped, trainer=failed)
    )


def test_workers_are_wanted_where_there_is_none() -> None:
    assert "; 0 workers (1 or more wanted)\n" in as_table(run_status(workers={}))


def test_what_samples_take_is_always_shown_in_a_full_buffer() -> None:
    full = Fullness.of_memory(98 * 2**20, 100 * 2**20)
    assert "98% of maxmemory (98 MiB of 100 MiB)" in as_table(run_status(fullness=full))
    assert "math: samples take 0 B\n" in as_table(run_status(fullness=full)) + "\n"
    assert "samples take" not in as_table(run_status())
    trained = task_status(bytes={"completed": 1024, "archived": 2048})
    assert (
        "math: samples take 3 KiB (completed 1 KiB, archived 2 KiB; archived groups are trained, and stay until a "
        "checkpoint)" in as_table(run_status(trained, fullness=full), 200)
    )
