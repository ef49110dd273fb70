"""A producer finds the prompts that its run began with, or says what has changed."""

import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import RunMismatch
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.keys import task_keys
from rollq.producer.prompt_records import check_prompts
from rollq.producer.prompts import PromptFile
from rollq.producer.run import open_prompts, run_producer
from rollq.producer.settings import ProducerSettings
from support.producer_run import prompt_file, task_settings


@pytest.fixture
def buffer(server_url: str, run_name: str) -> Iterator[Buffer]:
    with Buffer.connect(server_url, run_name) as buffer:
        buffer.create_run()
        for task in ("math", "math.1of2", "code.1of2"):
            buffer.register_task(task, TaskRules(batch_groups=4))
        buffer.register_task("held_out", TaskRules(batch_groups=1, kind="eval"))
        yield buffer


def start(buffer: Buffer, path: Path, task: str = "math", *, seed: int = 0, **changes: Any) -> None:
    """What a producer does first."""
    with PromptFile(task_settings(path, **changes)) as file:
        check_prompts(buffer, task, file, seed)


def test_the_same_prompts_are_accepted_wherever_they_are(buffer: Buffer, tmp_path: Path) -> None:
    first = prompt_file(tmp_path / "p.jsonl", 5)
    start(buffer, first)
    start(buffer, first)
    (tmp_path / "elsewhere").mkdir()
    start(buffer, Path(shutil.copy(first, tmp_path / "elsewhere/q.jsonl")))
    assert buffer.counts("math").progress["cursor"] == 0


@pytest.mark.parametrize("rows", [4, 5, 6])
def test_another_file_is_refused_with_both_counts_and_the_remedy(buffer: Buffer, tmp_path: Path, rows: int) -> None:
    path = prompt_file(tmp_path / "p.jsonl", 5)
    start(buffer, path)
    path.write_bytes(prompt_file(tmp_path / "new.jsonl", rows).read_bytes().replace(b'"0"', b'"zero"'))
    with pytest.raises(RunMismatch) as refused:
        start(buffer, path)
    assert str(refused.value) == (
        f"tasks.math.prompts: {str(path)!r} has changed since the run began ({rows} rows, 5 before). The order of the "
        "prompts, and the place in it, depend on this: change it back, set "
        'tasks.math.rows.on_prompts_changed = "continue" to continue at the same place in the new order, or give '
        "the run another name"
    )


def test_a_file_of_another_name_is_refused_with_both_names(buffer: Buffer, tmp_path: Path) -> None:
    path, other = prompt_file(tmp_path / "p.jsonl", 5), prompt_file(tmp_path / "new.jsonl", 6)
    start(buffer, path)
    problem = f"tasks.math.prompts: {str(other)!r} (6 rows) differs from {str(path)!r} (5 rows), which the run had."
    with pytest.raises(RunMismatch, match=f"^{re.escape(problem)}"):
        start(buffer, other)


def test_another_seed_is_refused(buffer: Buffer, tmp_path: Path) -> None:
    path = prompt_file(tmp_path / "p.jsonl", 5)
    start(buffer, path, "code.1of2")
    problem = "tasks.code.prompts: the run had seed = 0, but the settings have seed = 1."
    with pytest.raises(RunMismatch, match=f"^{re.escape(problem)}"):
        start(buffer, path, "code.1of2", seed=1)


def test_production_continues_with_other_prompts_where_that_is_asked_for(
    buffer: Buffer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = prompt_file(tmp_path / "old.jsonl", 5), prompt_file(tmp_path / "new.jsonl", 7)
    client: Any = buffer.client
    statistics = task_keys(buffer.run, "math").prompts
    start(buffer, old)
    client.hset(statistics, "3", "1,1,1,1,1")
    start(buffer, old, seed=1, on_prompts_changed="continue")
    assert client.exists(statistics), "these are the same prompts, in another order"
    start(buffer, new, seed=1, on_prompts_changed="continue")
    assert not client.exists(statistics), "row 3 is another prompt now"
    start(buffer, new, seed=1)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.rpartition(";")[2] for line in warnings] == [
        " production continues at the same place in the new order"
    ] * 2
    assert "new.jsonl' (7 rows) differs from " in warnings[1]
    with pytest.raises(RunMismatch, match=r"old\.jsonl' \(5 rows\) differs from "):
        start(buffer, old, seed=1)


def test_a_call_that_arrives_again_does_not_bring_old_prompts_back(buffer: Buffer) -> None:
    for revision, digest in enumerate(["a", "b", "a"]):
        assert buffer.record_prompts("math", digest, 5, "", "p", revision=revision).revision == revision + 1
    assert buffer.record_prompts("math", "b", 5, "", "p", revision=1).digest == "a"


def test_of_two_producers_with_different_prompts_one_starts(buffer: Buffer, tmp_path: Path) -> None:
    paths = [prompt_file(tmp_path / "one.jsonl", 5), prompt_file(tmp_path / "two.jsonl", 6)]
    ready = threading.Barrier(2)

    def produce(path: Path) -> bool:
        with PromptFile(task_settings(path)) as file:
            ready.wait()
            try:
                check_prompts(buffer, "math", file, 0)
            except RunMismatch:
                return False
            return True

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(produce, paths)) == [False, True]


def test_a_restored_run_knows_its_prompts(buffer: Buffer, server_url: str, tmp_path: Path) -> None:
    start(buffer, prompt_file(tmp_path / "p.jsonl", 5))
    buffer.save(tmp_path / "saved")
    with Buffer.connect(server_url, f"{buffer.run}-again") as again:
        again.restore(tmp_path / "saved")
        start(again, tmp_path / "p.jsonl")
        with pytest.raises(RunMismatch, match=r"\(6 rows, 5 before\)"):
            start(again, prompt_file(tmp_path / "p.jsonl", 6))


def test_the_order_of_an_evaluation_has_no_seeds(buffer: Buffer, tmp_path: Path) -> None:
    path = prompt_file(tmp_path / "p.jsonl", 5)
    start(buffer, path, "held_out")
    start(buffer, path, "held_out", seed=1)
    with pytest.raises(RunMismatch, match=r"^evaluations\.held_out\.prompts: .* \(6 rows, 5 before\)"):
        start(buffer, prompt_file(path, 6), "held_out")


def test_a_producer_compares_all_prompts_before_it_produces(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = prompt_file(tmp_path / "one.jsonl", 5), prompt_file(tmp_path / "other.jsonl", 6)
    start(buffer, one, "held_out")
    stopped = threading.Event()
    stopped.set()
    tasks = {"math.1of2": task_settings(one)}

    def produce(evaluated: Path) -> None:
        with open_prompts(tasks, {"held_out": task_settings(evaluated)}) as prompts:
            run_producer(buffer, None, prompts, ProducerSettings(), stop=stopped)  # type: ignore[arg-type]

    produce(one)
    with pytest.raises(RunMismatch, match=r"^evaluations\.held_out"):
        produce(other)
    tasks["math.1of2"] = task_settings(other)
    with pytest.raises(RunMismatch, match=r"^tasks\.math\.prompts"):
        produce(one)


def test_a_file_that_is_changed_in_place_is_refused_and_one_that_is_touched_is_not(tmp_path: Path) -> None:
    path = prompt_file(tmp_path / "p.jsonl", 5)
    with PromptFile(task_settings(path)) as file:
        os.utime(path, ns=(1, 1))
        assert file.prompt(3).content == "3"
        with path.open("r+b") as opened:
            opened.seek(path.read_bytes().index(b"3"))
            opened.write(b"7")
        os.utime(path, ns=(2, 2))
        with pytest.raises(RunMismatch, match=r"was changed while it was in use: .* write another file and rename it"):
            file.prompt(4)


def test_a_file_that_is_replaced_is_read_to_the_end(tmp_path: Path) -> None:
    path = prompt_file(tmp_path / "p.jsonl", 5)
    with PromptFile(task_settings(path)) as file:
        prompt_file(tmp_path / "q.jsonl", 2).rename(path)
        assert file.prompt(4).content == "4"
