"""The files of rows: the same from every process, without repeats and without the rows of evaluations."""

import os
import signal
import subprocess
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from rollq.buffer.errors import ConfigError
from rollq.environments.expansion import Environment
from rollq.environments.rows import digest_of, made_rows, unstable_rows, write_missing_rows, write_rows
from support.waiting import wait_until

SMALL: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
WRITE = """
import sys
from pathlib import Path
from rollq.environments.expansion import Environment
from rollq.environments.rows import write_missing_rows
write_missing_rows(Environment("reasoning-gym:chain_sum", {}, "train", int(sys.argv[2])), Path(sys.argv[1]))
"""


def sums(split: str = "train", *, rows: int = 50, **options: Any) -> Environment:
    return Environment("reasoning-gym:chain_sum", options, split, rows)


def read(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def writing(folder: Path, rows: int, hash_seed: int) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", WRITE, str(folder), str(rows)], env=environment)


def test_rows_do_not_repeat_and_a_small_space_ends(tmp_path: Path) -> None:
    written = write_rows(sums(rows=5_000, **SMALL), tmp_path / "rows.jsonl", tmp_path)
    rows = read(tmp_path / "rows.jsonl")
    assert len({digest_of(row) for row in rows}) == len(rows) == written.rows
    assert 100 < written.rows < 1_000 < written.repeated


@pytest.mark.long
def test_splits_share_rows_only_by_chance_and_a_task_has_none_of_its_evaluation(tmp_path: Path) -> None:
    evaluation = sums("test", rows=20, **SMALL)
    task = Environment(evaluation.env, evaluation.options, "train", 5_000, (evaluation,))
    write_rows(task, tmp_path / "train.jsonl", tmp_path)
    trained = {digest_of(row) for row in read(tmp_path / "train.jsonl")}
    held_out = {digest_of(row) for row in read(tmp_path / evaluation.file())}
    assert len(held_out) == 20
    assert trained.isdisjoint(held_out)


def test_a_file_of_an_evaluation_that_was_edited_is_named_with_its_line(tmp_path: Path) -> None:
    evaluation = sums("test", rows=3)
    file = write_missing_rows(evaluation, tmp_path)
    task = Environment(evaluation.env, evaluation.options, "train", 3, (evaluation,))
    good = file.read_bytes()
    for bad in (b"not a row", b"[1]", b'{"prompt": "a", "env": 3}', b'"text"'):
        file.write_bytes(good + bad + b"\n")
        with pytest.raises(ConfigError, match=r"\.jsonl:4: not a row: remove the file"):
            write_rows(task, tmp_path / "train.jsonl", tmp_path)


def test_neighbouring_seeds_have_other_rows() -> None:
    first, second = ({digest_of(row) for row in islice(made_rows(sums(seed=seed, min_digits=4, max_digits=6)), 100)}
                     for seed in (1, 2))  # fmt: skip
    assert first.isdisjoint(second)


@pytest.mark.long
def test_producers_on_other_hash_seeds_write_the_same_file(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    processes = [writing(folder, 60, seed) for folder, seed in zip(folders, (3, 4), strict=True)]
    assert [process.wait() for process in processes] == [0, 0]
    first, second = (next((folder / "environments").glob("*.jsonl")).read_bytes() for folder in folders)
    assert first == second


def test_a_file_is_whole_or_absent_after_a_kill(tmp_path: Path) -> None:
    process = writing(tmp_path, 200_000, 0)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: bool(children.read_text()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(tmp_path.rglob("*.jsonl")) == []
    path = write_missing_rows(sums(), tmp_path)
    before = path.stat().st_mtime_ns
    assert write_missing_rows(sums(), tmp_path) == path
    assert path.stat().st_mtime_ns == before


def test_the_process_that_makes_rows_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("ROLLQ_REDIS_PASSWORD", "ROLLQ_REDIS_URL", "OPENAI_API_KEY", "HF_TOKEN")
    for name in secrets:
        monkeypatch.setenv(name, "hunter2")
    before = set(psutil.Process().children())
    with closing(made_rows(sums())) as rows:
        next(rows)
        [child] = set(psutil.Process().children()) - before
        assert child.environ().keys() & set(secrets) == set()
        assert "PATH" in child.environ()


def test_the_process_that_makes_rows_ends_with_its_parent(tmp_path: Path) -> None:
    parent = writing(tmp_path, 2_000_000, 0)
    wait_until(
        lambda: any("making_rows" in " ".join(child.cmdline()) for child in psutil.Process(parent.pid).children())
    )
    [child] = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.long
@pytest.mark.parametrize("generator", ["word_ladder", "polynomial_multiplication"])
def test_sets_that_depend_on_the_hash_seed_are_the_same_anyway_and_are_said(generator: str) -> None:
    environment = Environment(f"reasoning-gym:{generator}", {}, "train", 20)
    first, second = (list(islice(made_rows(environment), 20)) for _ in range(2))
    assert first == second
    assert unstable_rows(environment, 20) > 0


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (Environment("reasoning-gym:no_such", {}, "train", 5), "has no generator 'no_such'"),
        (
            Environment("reasoning-gym:chain_sum", {"colour": 3}, "train", 5),
            "env_options.colour: unknown key; chain_sum has ",
        ),
    ],
)
def test_what_the_package_refuses_is_one_clear_error(environment: Environment, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        write_rows(environment, tmp_path / "rows.jsonl", tmp_path)
    assert not (tmp_path / "rows.jsonl").exists()
