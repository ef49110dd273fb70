"""`rollq groups query` finds the rollouts of a train step in the buffer, in the archive, or dropped."""

import shutil
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from rollq.buffer.buffer import Buffer
from rollq.buffer.values.rollouts import GroupResult
from rollq.cli.main import main
from support.buffer_run import World, make_sample

WORST = '{"step": 3, "sample": {"reward": {"$lte": 0.2}}}'
"""Reward 0, longest answer, step 3: with `--sort -tokens`."""
Ask = Callable[..., Result]


@pytest.fixture
def world(buffer: Buffer) -> World:
    return World(buffer)


def settings(world: World, server_url: str, folder: Path, archive: str = "") -> Path:
    file = folder / "rollq.toml"
    file.write_text(
        f'run = "{world.buffer.run}"\n[redis]\nbuffer_url = "{server_url}"\n{archive}'
        '[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 2\n'
    )
    return file


def train(world: World, steps: int) -> None:
    """Two groups a step, with wrong answers of more and more tokens; the second group's is longer."""
    for step in range(1, steps + 1):
        world.admit(2)
        for place, lease in enumerate(world.lease(2)):
            wrong = make_sample(step - 1, reward=0.0, tokens=10 * step + place)
            world.buffer.put([GroupResult(lease, (make_sample(step - 1, tokens=99), wrong))])
        world.train(step)


def ask(file: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["groups", "query", str(file), *(words or (WORST, "--sort", "-tokens"))])


def listed(found: Result) -> list[list[str]]:
    assert found.exit_code == 0, found.output
    rows = [line.split() for line in found.output.splitlines()[1:]]
    return [row[:4] + row[5:] for row in rows]  # in the archive, staleness is as it was at the step


def expected(status: str) -> list[list[str]]:
    numbers = ["3", "0.500", "99", "1"]
    return [
        ["math", str(uid), status, *numbers, "1:", "reward", "0,", str(tokens), "tokens"]
        for uid, tokens in ((6, 31), (5, 30))
    ]


def test_reward_0_and_the_longest_answer_of_a_step_is_one_command(
    world: World, server_url: str, tmp_path: Path
) -> None:
    world.start()
    train(world, 4)
    file = settings(world, server_url, tmp_path)
    assert listed(ask(file)) == expected("archived")
    first = ask(file, WORST, "--sort", "-tokens", "--limit", "1", "--json")
    found = orjson.loads(first.output)
    assert (found["uid"], found["samples"]) == (
        6, [{"index": 1, "reward": 0.0, "tokens": 31, "finish_reason": "stop", "error": "", "is_valid": True,
             "failure": None}],
    )  # fmt: skip
    wrong = ask(file, WORST, "--sort", "colour")
    assert wrong.exit_code == 2
    assert "sort by 'colour': must be one of reward, min_reward" in wrong.output


def test_groups_that_a_checkpoint_has_dropped_are_said(world: World, server_url: str, tmp_path: Path) -> None:
    world.start()
    train(world, 4)
    world.buffer.checkpoint(world.held, 4)
    file = settings(world, server_url, tmp_path)
    found = ask(file)
    assert found.exit_code == 0
    assert found.output.splitlines() == [
        "no groups",
        "task math: each of the 8 groups of steps 1 to 4 was dropped by a checkpoint; url in [archive] keeps them",
    ]
    assert ask(file, '{"step": 5}').output == "no groups\n"
    assert ask(file, '{"step": 3, "status": "completed"}').output == "no groups\n"


@pytest.fixture
def archived(world: World, server_url: str, tmp_path: Path) -> Path:
    """A run whose first three steps are in the archive beside its settings, and whose fourth one is leaving."""
    world.start(math={"archive": True})
    train(world, 3)
    world.buffer.checkpoint(world.held, 3)
    (tmp_path / "archive").mkdir()
    file = settings(world, server_url, tmp_path, '[archive]\nurl = "archive"\n')
    done = CliRunner().invoke(main, ["archive", str(file), "--finish"])
    assert done.exit_code == 0, done.output
    assert not world.buffer.look("math", [6])
    return file


def test_groups_that_a_checkpoint_has_dropped_are_found_in_the_archive(archived: Path) -> None:
    assert listed(ask(archived)) == expected("archived")
    assert ask(archived, WORST, "--count").output == "2\n"
    assert ask(archived, '{"step": {"$lte": 2}, "max_reward": 1}', "--count").output == "4\n"
    assert ask(archived, '{"step": 9}').output == "no groups\n"


def test_groups_on_their_way_to_the_archive_are_found_once(world: World, server_url: str, tmp_path: Path) -> None:
    world.start(math={"archive": True})
    train(world, 3)
    (tmp_path / "archive").mkdir()
    file = settings(world, server_url, tmp_path, '[archive]\nurl = "archive"\n')
    assert listed(ask(file)) == expected("archived")
    world.buffer.checkpoint(world.held, 3)
    assert listed(ask(file)) == expected("leaving")


def test_an_archive_that_cannot_be_reached_is_not_taken_for_an_empty_one(
    world: World, archived: Path, server_url: str
) -> None:
    moved = archived.parent / "elsewhere"
    shutil.move(archived.parent / "archive", moved)
    found = ask(archived)
    assert found.exit_code == 1
    assert "groups that have left the buffer are missing: archive.url = " in found.output
    assert "there is no such folder on this machine" in found.output
    (archived.parent / "archive").mkdir()
    assert "has nothing of this run, but the run has an archive" in ask(archived).output
    without = CliRunner().invoke(main, ["groups", "query", WORST, "--url", server_url, "--run", world.buffer.run])
    assert without.exit_code == 0
    assert "name the rollq.toml with the url of the archive" in without.output
