"""`rollq init`: what it writes runs as it is, and what exists stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollq.buffer.common.ports import free_port
from rollq.cli.main import main
from support.waiting import PATIENCE_S


def rollq(folder: Path, *words: str, status: int = 0) -> str:
    """Run a command in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "rollq.cli.main", *words],
        cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow  # tests/docs/test_first_run.py trains what it writes
def test_what_it_writes_trains_as_it_is(tmp_path: Path) -> None:
    shown = rollq(tmp_path, "init", "my-run")
    folder = tmp_path / "my-run"
    assert "wrote rollq.toml, prompts.jsonl, rewards.py, model, archive to " in shown
    assert "cd my-run && rollq up" in shown
    assert "nothing is wrong" in rollq(folder, "try")
    settings = (folder / "rollq.toml").read_text("utf-8")
    assert 'run = "my-run"' in settings
    few = settings.replace("steps = 40", "steps = 2").replace(":6379", f":{free_port('127.0.0.1')}")
    (folder / "rollq.toml").write_text(few, "utf-8")
    assert "\ntrained 2 of 2 steps in " in rollq(folder, "up")
    assert list((folder / "archive").rglob("step-*.parquet"))


@pytest.mark.parametrize("name", ["rollq.toml", "rewards.py", "model", "archive"])
def test_what_exists_is_not_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    result = CliRunner().invoke(main, ["init", str(tmp_path)])
    assert (result.exit_code, f"{str(tmp_path)!r} already has {name}" in result.output) == (2, True)
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "mine"
