"""`rollq status --steps`: from the server, and from files once the run or its server is gone."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.tickets import open_queue
from rollq.cli.main import main
from support.buffer_run import World, set_clock

LINE = {"step": 1, "time_s": 5.0, "reward": 0.25, "response_length": {"mean": 12.0, "max": 20, "clip_ratio": 0.5}}


@pytest.fixture
def file(server_url: str, tmp_path: Path) -> Path:
    """Settings of run `sums` on the shared server, whose trainer has written one step."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text(json.dumps(LINE) + "\n")
    (tmp_path / "out" / "evaluations.jsonl").write_text('{"step": 0, "time_s": 4.0, "eval/held_out/reward": 0.125}\n')
    return written(tmp_path, server_url)


def written(folder: Path, url: str) -> Path:
    path = folder / "rollq.toml"
    path.write_text(
        f'run = "sums"\n[redis]\nbuffer_url = "{url}"\n[worker]\nengine = "simulated"\n'
        '[tasks.math]\nprompts = "p.jsonl"\njudge = "exact_match"\nbatch_groups = 2\ngroup_size = 2\nmax_tokens = 64\n'
        f'[trainer]\nmodel = "model"\noutput = "{folder / "out"}"\nsteps = 9\n'
    )
    return path


def steps(file: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["status", str(file), "--steps", *more])


def test_a_live_run_is_shown_by_step_with_its_changes(server_url: str, file: Path) -> None:
    with Buffer.connect(server_url, "sums") as buffer:
        world = World(buffer).start(math={})
        assert steps(file).output == "run sums: no train step yet\n"
        for step in (1, 2):
            buffer.report_trainer(world.held, {**LINE, "step": step, "reward": 0.5})
        buffer.report_evaluations(world.held, 2, {"held_out": 0.75})
        buffer.change_rules("math", {"max_tries": 9})
    hint = CliRunner().invoke(main, ["status", str(file)]).output.splitlines()[-1]
    assert hint == "reward, lengths and more by train step: rollq status --steps"
    lines = steps(file).output.splitlines()
    assert lines[0] == "run sums: 2 train steps"
    assert lines[2].split() == ["step", "reward", "length", "longest", "cut", "held_out"]
    assert lines[4].split() == ["2", "0.500", "12", "20", "50%", "0.750"]
    assert lines[-1].split(maxsplit=2)[1:] == ["math", "max_tries 3 -> 9"]
    found = json.loads(steps(file, "--json").output)
    assert (found["source"], found["steps"], found["changes"][0]["task"]) == ("server", [1, 2], "math")


def test_files_are_shown_when_the_run_was_deleted(server_url: str, file: Path) -> None:
    with Buffer.connect(server_url, "sums") as buffer:
        world = World(buffer).start(math={})
        buffer.report_trainer(world.held, {"step": 7, "reward": 0.5})
        buffer.end_lease(world.held)
        set_clock(buffer, "math", reaped_ms=0)
        with open_queue(server_url, "sums").connection as connection:
            buffer.delete_run(open_queue(server_url, "sums"))
            assert connection.keys("rollq:{sums}:*") == []
    shown = steps(file).output
    assert "1 train step; from the files in " in shown
    assert "since run 'sums' is not in this store" in shown
    assert shown.splitlines()[-1].split() == ["1", "0.250", "12", "20", "50%", "0.125"]
    assert json.loads(steps(file, "--json").output)["source"] == "files"


def test_files_are_shown_when_the_server_is_gone_and_its_error_where_there_are_none(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "server") as server:
        file = written(tmp_path, server.url)
    refused = steps(file)
    assert (refused.exit_code, refused.output.count("\n")) == (1, 1)
    assert "error: " in refused.output
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text(json.dumps(LINE) + "\n")
    shown = steps(file).output
    assert "from the files in " in shown
    assert "since redis://" in shown
