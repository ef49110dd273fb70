"""README.md, docs/guide/watching.md and docs/concepts: every command runs, beside roles that are started one by one."""

import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from rollq.monitor.report.records import METRICS_FILE
from support.demo_folder import PREPARE
from support.documented_commands import ROOT, Desk, blocks, code_with, files, kill, steps_trained, terminals

README = ROOT / "README.md"
WATCHING = ROOT / "docs" / "guide" / "watching.md"
CONCEPTS = sorted((ROOT / "docs" / "concepts").glob("*.md"))


@pytest.mark.long
def test_the_roles_run_one_by_one_and_continue_after_a_kill(desk: Desk, sums: Path, redis_cli: Path) -> None:
    serve, produce, work, second_work, train = terminals(README)
    (desk.folder / "trainer.py").write_text(desk.local(files(README)["trainer.py"]))
    assert code_with(README, "--prepare").split() == [*PREPARE]
    config = sums / "rollq.toml"
    endless = re.sub(r"^steps = \d+$", "steps = 1000000", desk.local(config.read_text("utf-8")), flags=re.MULTILINE)
    config.write_text(endless)
    metrics = sums / "trainer" / METRICS_FILE
    with desk:
        desk.open("redis", serve)
        desk.wait_until(lambda: b"serving at" in desk.log("redis").read_bytes())
        desk.open("produce", produce)
        desk.open("work", work)
        trained = desk.run(code_with(README, "trainer.py"))
        assert re.findall(r"^step (\d): reward \d", trained, re.MULTILINE) == ["1", "2", "3"]

        desk.open("second work", second_work)
        desk.open("train", train)
        desk.wait_until(lambda: steps_trained(metrics) >= 4)
        kill(desk.terminals["train"])
        kill(desk.terminals["work"])
        trained_steps = steps_trained(metrics)
        del desk.terminals["work"]
        desk.open("train", train)
        desk.wait_until(lambda: steps_trained(metrics) > trained_steps)

        assert "\nrun demo: version " in desk.run(code_with(README, "rollq status"))
        watch(desk)
        commands = [line for page in CONCEPTS for block in blocks(page) for line in block.code.splitlines()]
        (recover,) = (line for line in commands if "rollq runs recover" in line)
        for line in commands:
            if "rollq groups show" in line:
                desk.wait_until(partial(shows_a_group, desk, line))
            elif line != recover:
                assert desk.run(line)
        desk.interrupt("train")
        del desk.terminals["train"]
        shutil.copytree(sums / "model", desk.folder / "backups" / "step-1")
        assert "\nwould make a checkpoint of step " in desk.run(recover)
        for name in ("second work", "produce", "redis"):
            desk.interrupt(name)
        assert all("stopped" in desk.log(name).read_text() for name in ("train", "second work", "produce"))


def shows_a_group(desk: Desk, command: str) -> bool:
    """Whether the command succeeds: now and then, no group has the status that it asks for."""
    try:
        return "sum" in desk.run(command)
    except AssertionError as error:
        if "no group of sum" not in str(error):
            raise
        return False


def watch(desk: Desk) -> None:
    """Run the commands of the page on watching a run."""
    assert '"tasks"' in desk.run(code_with(WATCHING, "--json"))
    assert "reward" in desk.run(code_with(WATCHING, "--steps"))
    assert desk.run(code_with(WATCHING, "rollq groups query")).startswith(("task ", "no "))
    for line in code_with(WATCHING, "rollq groups show").splitlines():
        desk.wait_until(partial(shows_a_group, desk, line))
    (look,) = [block.code for block in blocks(WATCHING) if block.mark == "redis-cli"]
    shown = [desk.run(line).strip() for line in look.splitlines()]
    assert all(number.isdecimal() for number in shown[:4])
    assert "consumed" in shown[4]
    assert '"version":' in shown[5]
