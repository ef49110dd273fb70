"""`rollq evaluate`, with real roles and servers: saved weights are measured, and nothing is left behind."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.runs import GONE, find_runs, summarize
from rollq.buffer.errors import ConfigError
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.servers import connect_servers
from rollq.cli.run_location import RunLocation
from rollq.cli.up.evaluation import Evaluated, plot, tables
from rollq.cli.up.evaluation_runs import EvaluationRuns
from support.buffer_run import World
from support.waiting import wait_until

HELD_OUT = """
[evaluations.held_out]
prompts = "held_out.jsonl"
rows = { prompt_field = "prompt", answer_field = "answer", chat = false }
judge = "exact_match"
group_size = 2
max_tokens = 8
"""

Evaluate = Callable[..., "subprocess.CompletedProcess[str]"]


def prepare(prepared_demo: Path, folder: Path) -> None:
    """The files of a demo, with an evaluation and two folders of weights."""
    shutil.copytree(prepared_demo, folder)
    rows = (folder / "prompts" / "sum.jsonl").read_text().splitlines()[:6]
    held_out = [json.dumps({**json.loads(row), "data_source": f"org/{i % 2}"}) for i, row in enumerate(rows)]
    (folder / "held_out.jsonl").write_text("\n".join(held_out))
    with (folder / "rollq.toml").open("a") as file:
        file.write(HELD_OUT)
    for name in ("step-00000001", "step-00000002"):
        shutil.copytree(folder / "model", folder / name)


@contextmanager
def started(folder: Path, server: EmbeddedServer, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """The command, on the files in the folder. What is left of it is killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-m", "rollq.cli.main", "evaluate", "rollq.toml", *options],
        cwd=folder,
        env={**os.environ, "ROLLQ_REDIS_URL": server.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def evaluate(prepared_demo: Path, tmp_path: Path, fresh_server: EmbeddedServer) -> Evaluate:
    """Runs the command on the files of a demo, with two folders of weights."""
    prepare(prepared_demo, tmp_path / "run")

    def run(*options: str) -> "subprocess.CompletedProcess[str]":
        with started(tmp_path / "run", fresh_server, *options) as process:
            output, errors = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    return run


def runs_on(server: EmbeddedServer) -> set[str]:
    """Names of the runs on a server."""
    return {run.run for run in find_runs(connect_servers(server.url, None), Patience())}


@pytest.mark.long
def test_saved_weights_are_evaluated_in_a_run_that_is_deleted(
    evaluate: Evaluate, tmp_path: Path, fresh_server: EmbeddedServer
) -> None:
    done = evaluate("--weights", "step-00000001", "step-00000002", "--json", "--plot", "plot.png")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert [one["weights"] for one in (first, second)] == ["step-00000001", "step-00000002"]
    assert [one["metrics"]["eval/held_out/count"] for one in (first, second)] == [6, 6]
    assert "eval/held_out/pass@2" in first["metrics"]
    assert [first["metrics"][f"eval/held_out/source/org/{number}/count"] for number in (0, 1)] == [3, 3]
    assert (tmp_path / "run" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert runs_on(fresh_server) == set()
    (notes,) = (tmp_path / "run").rglob("evaluation/runs/*")
    assert list(notes.iterdir()) == []


@pytest.mark.long
def test_what_a_killed_evaluation_left_is_deleted_by_the_next_and_that_of_a_live_one_is_not(
    evaluate: Evaluate, prepared_demo: Path, tmp_path: Path, fresh_server: EmbeddedServer
) -> None:
    prepare(prepared_demo, tmp_path / "other")
    waits = ("--weights", "step-00000001", "--workers", "0")
    with started(tmp_path / "run", fresh_server, *waits) as process:
        wait_until(lambda: len(runs_on(fresh_server)) == 1)
        process.kill()
    (left,) = runs_on(fresh_server)
    with started(tmp_path / "other", fresh_server, *waits) as live:
        wait_until(lambda: len(runs_on(fresh_server)) == 2)
        done = evaluate("--weights", "step-00000001", "--json")
        assert done.returncode == 0, done.stderr
        assert f"deleted run {left!r}, which a killed evaluation had left" in done.stderr
        assert len(runs_on(fresh_server) - {left}) == len(runs_on(fresh_server)) == 1
        assert live.poll() is None


def test_a_run_of_another_machine_is_deleted_once_no_role_uses_it(
    buffer: Buffer, server_url: str, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    World(buffer).start().admit(1)
    location = RunLocation.at(server_url, run_name)
    runs = EvaluationRuns.at(location, tmp_path, is_beside=False)
    runs.folder.mkdir(parents=True)
    note = runs.folder / run_name
    note.write_text("another machine")
    assert summarize(buffer).roles
    runs.delete_left(location)
    assert f"run {run_name!r} of another evaluation is in use: " in capsys.readouterr().err
    assert note.exists()
    buffer.client.hset(buffer.keys.trainer, "deadline_ms", 1)
    for task in buffer.tasks():
        buffer.client.hset(task_keys(run_name, task).clock, "reaped_ms", 1)
    assert summarize(buffer).roles == ()
    runs.delete_left(location)
    assert f"deleted run {run_name!r}" in capsys.readouterr().err
    assert (summarize(buffer).state, note.exists()) == (GONE, False)


def test_a_run_of_this_machine_is_deleted_at_once_and_a_note_without_a_run_vanishes(
    buffer: Buffer, server_url: str, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    World(buffer).start()
    location = RunLocation.at(server_url, run_name)
    runs = EvaluationRuns.at(location, tmp_path, is_beside=False)
    runs.folder.mkdir(parents=True)
    for name in (run_name, f"{run_name}-gone", "not a name"):
        (runs.folder / name).write_text(socket.gethostname())
    assert summarize(buffer).roles
    runs.delete_left(location)
    assert summarize(buffer).state == GONE
    assert [note.name for note in runs.folder.iterdir()] == ["not a name"]
    assert "run 'not a name', which a killed evaluation has left, stays: " in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "Missing option '--weights'"),
        (("--weights", "nowhere"), "--weights 'nowhere': the folder is missing, or has no *.safetensors"),
        (("--weights", "step-00000001", "server"), "--weights 'server': the folder is missing, or has no"),
    ],
)
def test_folders_without_weights_are_refused(evaluate: Evaluate, options: tuple[str, ...], message: str) -> None:
    done = evaluate(*options)
    assert done.returncode == 2
    assert message in done.stderr


def result(step: int, **metrics: float) -> Evaluated:
    return Evaluated(Path(f"out/step-{step:08}"), {f"eval/held_out/{key}": value for key, value in metrics.items()})


def test_a_table_has_a_row_for_each_folder_and_one_table_for_each_source() -> None:
    of_source = {"source/org/math/count": 5.0, "source/org/math/parts/count": 2.0}
    results = [
        result(1, reward=0.25, count=10.0, **{"pass@1": 0.5, "source/org/math/reward": 0.125}, **of_source),
        result(
            2, reward=1.0, count=10.0, reward_std=0.1, **{"pass@1": 0.75, "source/org/math/reward": 0.5}, **of_source
        ),
    ]
    assert list(tables(results, ["held_out"])) == [
        "held_out",
        "  weights        reward  count  pass@1",
        "  step-00000001    0.25     10     0.5",
        "  step-00000002       1     10    0.75",
        "held_out, org/math",
        "  weights        reward  count  parts/count",
        "  step-00000001   0.125      5            2",
        "  step-00000002     0.5      5            2",
    ]


@pytest.mark.long
@pytest.mark.parametrize("path", ["missing/a.png", "a.xyz"])
def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_evaluated(evaluate: Evaluate, path: str) -> None:
    done = evaluate("--weights", "step-00000001", "--plot", path)
    assert done.returncode == 2
    assert f"--plot '{path}': must be a .png file in a folder that exists" in done.stderr


def test_checkpoints_are_drawn_by_their_steps(tmp_path: Path) -> None:
    plot(
        [result(20, reward=0.5, **{"pass@1": 0.5, "pass@4": 0.9}), result(10, reward=0.2)],
        ["held_out"],
        tmp_path / "a.png",
    )
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_plot_that_cannot_be_written_is_named_with_its_option(tmp_path: Path) -> None:
    (tmp_path / "plot.png").mkdir()
    with pytest.raises(ConfigError, match=r"--plot '.*plot.png': cannot be written: Is a directory"):
        plot([result(10, reward=0.2)], ["held_out"], tmp_path / "plot.png")
