"""`rollq set`, on a real server."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.rules.batch_sizes import groups_at
from rollq.cli.main import main
from support.buffer_run import World

Ask = Callable[..., Result]
SHARDS = ("math.1of2", "math.2of2")


class Killed(Exception):
    pass


@pytest.fixture
def ask(server_url: str, run_name: str, buffer: Buffer) -> Ask:
    tasks = {name: {"batch_groups": 16} for name in SHARDS}
    World(buffer).start(code={"batch_groups": 32}, **tasks)  # type: ignore[arg-type]

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, "--url", server_url, "--run", run_name])

    return run


def sizes(buffer: Buffer, step: int) -> dict[str, int]:
    found = {name: buffer.clock(name).rules for name in buffer.tasks()}
    return {name: groups_at(rules.batch_groups, rules.schedule, step) for name, rules in found.items()}


@pytest.mark.parametrize(
    "command", [["set", "math"], ["groups", "show", "math", "1"], ["groups", "query", "{}"]], ids=" ".join
)
def test_without_a_file_in_this_folder_the_run_must_be_named(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2
    assert "there is no rollq.toml in this folder: name the file of the run, or give --url and --run" in done.output


def test_rules_of_a_task_change_in_all_of_its_shards(ask: Ask, buffer: Buffer) -> None:
    result = ask("set", "math", "max_staleness=3", "batch_groups=9")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "task math.1of2: revision 2: max_staleness 1 -> 3 from step 1 on; batch_groups 16 -> 5 from step 2 on",
        "task math.2of2: revision 2: max_staleness 1 -> 3 from step 1 on; batch_groups 16 -> 4 from step 2 on",
        "the batch of step 2 has 41 groups instead of 64",
    ]
    assert sizes(buffer, 1) == {"code": 32, "math.1of2": 16, "math.2of2": 16}
    assert sizes(buffer, 2) == {"code": 32, "math.1of2": 5, "math.2of2": 4}
    assert ask("set", "math", "max_staleness=3").output == "task math.1of2: no change\ntask math.2of2: no change\n"


def test_steps_that_are_held_reach_to_the_next_checkpoint(server_url: str, buffer: Buffer, tmp_path: Path) -> None:
    World(buffer).start()
    (tmp_path / "rollq.toml").write_text(
        f'run = "{buffer.run}"\n[redis]\nbuffer_url = "{server_url}"\n[tasks.math]\nprompts = "prompts.jsonl"\n'
        f'batch_groups = 2\n[trainer]\nmodel = "model"\noutput = "output"\nsteps = 9\ncheckpoint_every = 5\n'
    )
    command = ["set", str(tmp_path / "rollq.toml"), "math"]
    refused = CliRunner().invoke(main, [*command, "max_uncheckpointed_steps=4"])
    assert refused.exit_code == 2
    assert "max_uncheckpointed_steps = 4: must not be below trainer.checkpoint_every = 5" in refused.output
    assert CliRunner().invoke(main, [*command, "max_uncheckpointed_steps=+4"]).exit_code == 2
    assert CliRunner().invoke(main, [*command, "max_uncheckpointed_steps=5"]).exit_code == 0
    assert buffer.clock("math").rules.max_uncheckpointed_steps == 5


def test_a_weight_shares_the_whole_batch_anew(ask: Ask, buffer: Buffer) -> None:
    result = ask("set", "code", "weight=3", "--from-step", "10")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "task code: revision 2: weight 1 -> 3, batch_groups 32 -> 48 from step 10 on",
        "task math.1of2: revision 2: batch_groups 16 -> 8 from step 10 on (shared by weight)",
        "task math.2of2: revision 2: batch_groups 16 -> 8 from step 10 on (shared by weight)",
    ]
    lines = ask("set", "code").output.splitlines()
    assert "  weight = 3" in lines
    assert lines[-1].startswith("  revision 2: weight 1 -> 3, batch_groups 32 -> 48 from step 10 on, by ")
    assert sizes(buffer, 9) == {"code": 32, "math.1of2": 16, "math.2of2": 16}
    assert sizes(buffer, 10) == {"code": 48, "math.1of2": 8, "math.2of2": 8}
    assert (buffer.rules("code").weight, buffer.rules("math.1of2").weight) == (3, 1)


def test_a_weight_that_was_interrupted_between_two_tasks_is_finished_by_a_repeat(
    ask: Ask, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = Buffer.change_rules

    def die_at_the_second(self: Buffer, task: str, *arguments: Any, **options: Any) -> Any:
        if task == "math.1of2":
            raise Killed
        return change(self, task, *arguments, **options)

    with monkeypatch.context() as dies:
        dies.setattr(Buffer, "change_rules", die_at_the_second)
        assert isinstance(ask("set", "code", "weight=3").exception, Killed)
    assert sum(sizes(buffer, 9).values()) == 48 + 32
    again = ask("set", "code", "weight=3")
    assert again.output.splitlines()[0] == "an interrupted change of weights is undone: the batch has 64 groups again"
    assert sizes(buffer, 9) == {"code": 48, "math.1of2": 8, "math.2of2": 8}
    assert "interrupted" not in ask("set", "code", "weight=3").output
    assert ask("set", "code", "batch_groups=80", "--from-step", "5").exit_code == 0
    assert "interrupted" not in ask("set", "code", "weight=1").output
    assert sum(sizes(buffer, 9).values()) == 96, "what was changed by hand since counts"


def test_a_dry_run_says_what_would_change_and_changes_nothing(ask: Ask, buffer: Buffer) -> None:
    result = ask("set", "code", "max_tries=5", "--dry-run")
    assert result.output == "task code: revision 2: max_tries 3 -> 5 from step 1 on (not changed: --dry-run)\n"
    ask("set", "code", "batch_groups=0", "--dry-run")
    clock = buffer.clock("code")
    assert (clock.rules_revision, clock.rules.max_tries, clock.control) == (1, 3, Control.RUN)


def test_without_a_change_the_rules_and_their_revisions_are_shown(ask: Ask) -> None:
    ask("set", "code", "max_tries=5")
    lines = ask("set", "code").output.splitlines()
    assert "  max_tries = 5" in lines
    assert "  group_size = 2  (fixed)" in lines
    assert re.match(r"  revision 2: max_tries 3 -> 5 from step 1 on, by .+:\d+", lines[-1])


def test_a_retired_task_leaves_the_batch_and_comes_back(ask: Ask, buffer: Buffer) -> None:
    retired = ask("set", "code", "batch_groups=0")
    assert retired.exit_code == 0
    assert re.search(r"the batch of step 2 has 32 groups instead of \d+\n", retired.output)
    assert sizes(buffer, 2) == {"code": 0, "math.1of2": 16, "math.2of2": 16}
    assert ask("set", "math", "weight=2", "--from-step", "3").exit_code == 0
    assert sizes(buffer, 3) == {"code": 0, "math.1of2": 16, "math.2of2": 16}, "it is shared by the others alone"
    last = ask("set", "math", "batch_groups=0")
    assert last.exit_code == 2
    assert "batch_groups: no task would have a group in the batch of step 2; stop the trainer instead" in last.output
    assert ask("set", "code", "batch_groups=8", "--from-step", "5").exit_code == 0
    assert [buffer.clock(name).control for name in buffer.tasks()] == [Control.RUN] * 3
    assert sizes(buffer, 5)["code"] == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["math", "group_size=4"], "group_size cannot change during a run: groups under way have that"),
        (["math", "max_stalenes=4"], "max_stalenes is not a rule; did you mean 'max_staleness'"),
        (
            ["math", "temperature=0.7"],
            "temperature is not a rule: change tasks.math",
        ),
        (["math", "max_staleness"], "'max_staleness': write it as RULE=VALUE, such as max_staleness=2"),
        (["math", "max_tries=4", "max_tries=5"], "max_tries is given twice"),
        (["math", "weight=much"], "weight = much: must be a number"),
        (["math", "weight=2", "batch_groups=3"], "give one of them"),
        (["maths", "max_tries=4"], "task 'maths': run '.*' has the tasks code, math.1of2, math.2of2"),
        (["math", "batch_groups=x"], "batch_groups: must be a whole number"),
        (["math", "max_tries=5", "audit_groups=-1"], "audit_groups: must be greater than or equal to 0"),
    ],
)
def test_a_wrong_change_is_one_clear_line_and_changes_nothing(
    ask: Ask, buffer: Buffer, arguments: list[str], message: str
) -> None:
    result = ask("set", *arguments)
    assert result.exit_code == 2
    assert re.search(message, result.output), result.output
    assert [buffer.clock(name).rules_revision for name in buffer.tasks()] == [1, 1, 1]
