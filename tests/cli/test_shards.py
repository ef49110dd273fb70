"""`shards` of a task: what the settings make of it, and what a run that has other ones says."""

import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.errors import ConfigError, RunMismatch
from rollq.buffer.rules.batch_sizes import groups_at
from rollq.cli.main import main
from rollq.cli.run_location import open_run
from rollq.cli.settings.file import load_settings
from rollq.cli.settings.model import RollqSettings
from rollq.cli.settings.task_settings import TaskSettings
from rollq.producer.run import open_prompts
from rollq.workers.groups.recipes import make_recipes
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.settings import WorkerSettings


def rollq(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def task(**changes: object) -> TaskSettings:
    return TaskSettings.model_validate({"prompts": "p.jsonl", "batch_groups": 6, **changes})


def write(folder: Path, url: str, run: str, *, shards: int, rows: int = 9, more: str = "") -> Path:
    """A `rollq.toml` with a task `math`."""
    (folder / "p.jsonl").write_text("".join(f'{{"prompt": "{row}", "answer": "1"}}\n' for row in range(rows)))
    path = folder / f"{shards}.toml"
    path.write_text(
        f'run = "{run}"\n[redis]\nbuffer_url = "{url}"\n[worker]\nengine = "simulated"\n'
        f'[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 6\nbatches.shards = {shards}\n{more}'
    )
    return path


SIZES = st.integers(0, 200)


@settings(deadline=None)
@given(SIZES, st.dictionaries(st.integers(1, 50), SIZES, max_size=4), st.integers(1, 16), st.integers(0, 3000))
def test_shards_share_every_batch(first: int, later: dict[int, int], shards: int, audited: int) -> None:
    schedule = sorted(later.items())
    if max(first, *later.values(), 0) < shards:
        return
    whole = task(batch_groups=first, schedule=schedule, shards=shards, audit_groups=audited)
    parts = whole.as_shards("math").values()
    assert len(parts) == shards
    assert sum(part.audit_groups for part in parts) == audited
    for step in range(1, 52):
        sizes = [groups_at(part.batch_groups, part.schedule, step) for part in parts]
        assert sum(sizes) == groups_at(first, schedule, step)
        assert max(sizes) - min(sizes) <= 1
    for part in parts:
        TaskSettings.model_validate(part.model_dump())


def test_the_bounds_of_shards_add_up_to_those_of_their_task() -> None:
    whole = task(shards=3, tail_batch_trigger_size=4, keep_window=256)
    assert [part.tail_batch_trigger_size for part in whole.as_shards("math").values()] == [2, 2, 2]
    assert [part.keep_window for part in whole.as_shards("math").values()] == [86, 86, 86]
    dropped = task(shards=3, tail_batch_trigger_size=-1)
    assert [part.tail_batch_trigger_size for part in dropped.as_shards("math").values()] == [-1, -1, -1]
    assert task().as_shards("math") == {"math": task()}


@pytest.mark.parametrize(
    ("tasks", "problem"),
    [
        ({"math": {"shards": 7}}, "tasks.math.batches.shards = 7: no batch has more than 6"),
        ({"math": {"shards": 65}}, "less than or equal to 64"),
        ({"math.1of3": {}}, "belong to shards"),
    ],
)
def test_shards_that_make_no_sense_are_refused(tasks: dict[str, dict[str, object]], problem: str) -> None:
    tables = {name: {"prompts": "p.jsonl", "batch_groups": 6, **changes} for name, changes in tasks.items()}
    with pytest.raises(ValueError, match=problem):
        RollqSettings.model_validate({"run": "r", "tasks": tables})


def test_each_shard_needs_a_prompt(tmp_path: Path) -> None:
    found = load_settings(write(tmp_path, "redis://127.0.0.1:1/0", "r", shards=3, rows=2), {})
    with pytest.raises(ConfigError, match=r"tasks\.math\.batches\.shards = 3: there are 2 prompts"):
        open_prompts(found.train_tasks(), {}).__enter__()


def test_shards_share_the_file_and_the_judge(tmp_path: Path) -> None:
    found = load_settings(write(tmp_path, "redis://127.0.0.1:1/0", "r", shards=3), {})
    with open_prompts(found.train_tasks(), {}) as prompts:
        assert [feed.name for feed in prompts.tasks] == ["math.1of3", "math.2of3", "math.3of3"]
        assert len({id(feed.file) for feed in prompts.tasks}) == 1
    recipes = make_recipes(found.all_tasks(), WorkerSettings(engine="simulated"), 0, JudgePool(1))
    assert list(recipes) == ["math.1of3", "math.2of3", "math.3of3"]
    assert len({id(recipe) for recipe in recipes.values()}) == 1


@pytest.mark.parametrize(("before", "after"), [(3, 2), (3, 1), (1, 3)])
def test_a_run_keeps_its_shards(tmp_path: Path, server_url: str, run_name: str, before: int, after: int) -> None:
    created = load_settings(write(tmp_path, server_url, run_name, shards=before), {})
    open_run(created, threading.Event()).close()
    open_run(created, threading.Event()).close()
    changed = write(tmp_path, server_url, run_name, shards=after)
    with pytest.raises(RunMismatch, match=f"'math' was created with shards = {before}.*ask for shards = {after}"):
        open_run(load_settings(changed, {}), threading.Event())
    with Buffer.connect(server_url, run_name) as buffer:
        assert buffer.tasks() == sorted(created.train_tasks())


def test_a_snapshot_keeps_its_shards(tmp_path: Path, server_url: str, run_name: str) -> None:
    created = write(tmp_path, server_url, run_name, shards=3)
    open_run(load_settings(created, {}), threading.Event()).close()
    assert rollq("snapshot", "save", created, tmp_path / "saved").exit_code == 0
    other = write(tmp_path, server_url, f"{run_name}-2", shards=2)
    refused = rollq("snapshot", "load", other, tmp_path / "saved")
    assert refused.exit_code != 0
    assert "shards = 3, the settings ask for shards = 2" in refused.output
    same = write(tmp_path, server_url, f"{run_name}-2", shards=3)
    assert rollq("snapshot", "load", same, tmp_path / "saved").exit_code == 0
    open_run(load_settings(same, {}), threading.Event()).close()


def test_commands_know_the_task_by_its_name(tmp_path: Path, server_url: str, run_name: str) -> None:
    config = write(tmp_path, server_url, run_name, shards=2)
    with open_run(load_settings(config, {}), threading.Event()) as buffer:

        def controls() -> list[Control]:
            return [buffer.clock(name).control for name in ("math.1of2", "math.2of2")]

        assert rollq("pause", config, "--task", "math").exit_code == 0
        assert controls() == [Control.PAUSE, Control.PAUSE]
        assert rollq("resume", config, "--task", "math.2of2").exit_code == 0
        assert controls() == [Control.PAUSE, Control.RUN]
        unknown = rollq("pause", config, "--task", "code")
        assert "task 'code'" in unknown.output
    assert "math.1of2" in rollq("status", config).output
