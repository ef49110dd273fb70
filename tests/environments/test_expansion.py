"""`env` in rollq.toml: the keys that it sets, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.errors import ConfigError
from rollq.cli.settings.file import load_settings
from rollq.environments.expansion import Environment, expanded
from rollq.environments.kinds import kind_named, kind_names, split_env

SUMS = {"env": "reasoning-gym:chain_sum", "batch_groups": 2}
DESK = "mcp:http://127.0.0.1:1/mcp"
ASKED = {"env": DESK, "prompts": "mine.jsonl", "batch_groups": 2}
SERVED = {"env": "openenv:http://127.0.0.1:1", "batch_groups": 2}
GUESS = {"env": "text:games.Guess", "env_options": {"options": {"most": 3}}, "batch_groups": 2}
FILE = """\
run = "sums"

[tasks.sums]
env = "reasoning-gym:chain_sum"
env_options = { max_terms = 2 }
batch_groups = 2
"""


def expand(**tables: Any) -> dict[str, Any]:
    found = expanded(tables, Path())
    assert found.problems == []
    return found.data


def problems_of(**tables: Any) -> str:
    return "\n".join(expanded(tables, Path()).problems)


def test_a_line_sets_prompts_and_judge(tmp_path: Path) -> None:
    file = tmp_path / "rollq.toml"
    file.write_text(FILE)
    task = load_settings(file).tasks["sums"]
    assert task.prompts.parent == tmp_path / "environments"
    assert task.judge == "rollq.environments.reasoning_gym.judge.JUDGE"
    assert task.judge_options == {"generator": "chain_sum", "options": {"max_terms": 2}}


def test_keys_of_the_user_win() -> None:
    table = expand(tasks={"sums": {**SUMS, "judge": "last_number", "prompts": "mine.jsonl"}})["tasks"]["sums"]
    assert (table["judge"], table["prompts"]) == ("last_number", "mine.jsonl")
    assert "judge_options" not in table


def test_options_of_the_judge_that_the_user_sets_are_added() -> None:
    table = expand(tasks={"sums": {**SUMS, "judge_options": {"trust_graders": True}}})["tasks"]["sums"]
    assert table["judge_options"] == {"generator": "chain_sum", "options": {}, "trust_graders": True}


def test_a_custom_loop_gets_the_options_of_the_user_alone() -> None:
    mine = {**GUESS, "agent_loop": "mine.Loop", "agent_options": {"deep": True}}
    table = expand(tasks={"guess": mine})["tasks"]["guess"]
    assert (table["agent_loop"], table["agent_options"], table["judge"]) == ("mine.Loop", {"deep": True}, "environment")


def test_a_loop_or_a_judge_that_is_named_again_keeps_its_options() -> None:
    again = {**GUESS, "agent_loop": "environment", "judge": "environment", "agent_options": {"max_turns": 2}}
    options = expand(tasks={"guess": again})["tasks"]["guess"]["agent_options"]
    assert (options["options"]["path"], options["max_turns"]) == ("games.Guess", 2)


def test_tools_of_the_user_come_beside_tools_of_a_server() -> None:
    mine = {**ASKED, "agent_options": {"tools": {"calculator": {}}}}
    assert expand(tasks={"desk": mine})["tasks"]["desk"]["agent_options"]["tools"].keys() == {"server", "calculator"}


def test_an_offline_task_is_refused_with_the_keys_that_the_user_sets(tmp_path: Path) -> None:
    file = tmp_path / "rollq.toml"
    file.write_text(FILE.replace("batch_groups = 2", "batch_groups = 2\noffline = true"))
    with pytest.raises(ConfigError, match=r"tasks\.sums: env, env_options: a task with offline = true"):
        load_settings(file)


def test_the_rest_of_the_file_stays_as_it_is() -> None:
    plain = {"prompts": "a.jsonl", "judge": "math"}
    assert expand(tasks={"plain": plain}, run="x") == {"tasks": {"plain": plain}, "run": "x"}


def test_an_evaluation_has_the_split_test_and_its_rows_are_left_out_of_the_task() -> None:
    alone = expand(tasks={"sums": SUMS})["tasks"]["sums"]["prompts"]
    both = expand(tasks={"sums": SUMS}, evaluations={"held_out": {"env": SUMS["env"]}})
    assert len({alone, both["tasks"]["sums"]["prompts"], both["evaluations"]["held_out"]["prompts"]}) == 3


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"tasks": {"a": {"env": "chain_sum"}}}, 'tasks.a.env = "chain_sum": write a kind and a name'),
        ({"tasks": {"a": {"env": "gym:x"}}}, "tasks.a.env: unknown kind 'gym': use "),
        ({"tasks": {"a": {"env": "verifier:x"}}}, "verifiers; did you mean 'verifiers'?"),
        ({"tasks": {"a": {**SUMS, "env_options": {"rows": 0}}}}, "tasks.a.env_options.rows = 0: must be a whole"),
        ({"tasks": {"a": {**SUMS, "env_options": {"size": 9}}}}, "tasks.a.env_options.size: write rows"),
        ({"tasks": {"a": {**SUMS, "env_options": 3}}}, "tasks.a.env_options = 3: must be a table"),
        ({"tasks": {"a": {"env": 3}}}, "tasks.a.env = 3: must be a string in quotes"),
        ({"tasks": {"a": {**SUMS, "env_split": 1}}}, "tasks.a.env_split = 1: must be a string in quotes"),
        ({"tasks": {"a": {"env_split": "test"}}}, "tasks.a.env_split: set env too"),
        ({"tasks": {"a": {"env": "reasoning-gym:chain_sun"}}}, "a.env: reasoning-gym has no generator 'chain_sun'"),
        ({"tasks": {"a": {**SUMS, "env_options": {"max_termz": 3}}}}, "env_options.max_termz: unknown key; chain_sum"),
        ({"tasks": {"a": {"env": "openenv:http://"}}}, 'tasks.a.env = "openenv:http://": it has no host, or port 0: '),
        ({"tasks": {"a": {"env": "openenv:localhost:8000"}}}, "it does not begin with http:// or https://"),
        ({"tasks": {"a": {"env": "openenv:http://h:80x"}}}, "Port could not be cast"),
        ({"tasks": {"a": {"env": "openenv:http://h/?a=1"}}}, "it has parts other than a host and a path"),
        ({"tasks": {"a": {**SERVED, "env_options": {"seed": "8"}}}}, "a.env_options.seed = '8': must be a whole"),
        ({"tasks": {"a": {**SERVED, "env_options": {"reset": {"seed": 1}}}}}, "reset.seed comes from the row: leave"),
        (
            {"tasks": {"a": {**SERVED, "env_options": {"tools": True, "action": {"move": "{text}"}}}}},
            "tasks.a.env_options: action is for text, but with tools = true",
        ),
        (
            {"tasks": {"a": {"env": "reasoning-gym:boxnet"}}},
            'tasks.a.env = "reasoning-gym:boxnet": its grader gives its own answers 0: choose another generator',
        ),
        ({"evaluations": {"a": {**SUMS, "env_shared": True}}}, "evaluations.a.env_shared: only for tasks"),
        ({"tasks": {"a": {"env": DESK}}}, "has no prompts: set prompts"),
        ({"tasks": {"a": {**ASKED, "env_split": "test"}}}, f'a.env_split: env = "{DESK}" has no rows; leave it out'),
        ({"tasks": {"a": {**ASKED, "env_shared": True}}}, "tasks.a.env_shared: env = "),
        ({"evaluations": {"a": {**ASKED, "env_options": {"rows": 3}}}}, "evaluations.a.env_options.rows: env = "),
        (
            {"tasks": {"a": {**SUMS, "prompts": "mine.jsonl", "env_options": {"rows": 3}}}},
            "tasks.a.env_options.rows: prompts is set, so no rows are made; leave it out",
        ),
        (
            {"tasks": {"a": {**ASKED, "agent_loop": "environment"}}},
            f"tasks.a.agent_loop = 'environment': env = \"{DESK}\" sets agent_loop = \"tools\"; leave one of them out",
        ),
        ({"tasks": {"a": {**GUESS, "agent_loop": "single_turn"}}}, 'sets agent_loop = "environment"'),
        (
            {"tasks": {"a": {**SUMS, "env_split": "test"}}, "evaluations": {"b": {"env": SUMS["env"]}}},
            "tasks.a.env_split = 'test': an evaluation has the same rows",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_expanded_is_refused_with_its_place(tables: dict[str, Any], words: str) -> None:
    assert words in problems_of(**tables)


@pytest.mark.parametrize("own", ["tasks", "evaluations"])
def test_rows_that_are_not_used_are_not_left_out(own: str) -> None:
    tables: dict[str, Any] = {"tasks": {"a": dict(SUMS)}, "evaluations": {"b": {"env": SUMS["env"]}}}
    alone = expand(tasks={"a": SUMS})["tasks"]["a"]["prompts"]
    tables[own]["a" if own == "tasks" else "b"] |= {"prompts": "mine.jsonl"}
    tables["evaluations"]["b"]["env_split"] = "train"
    assert expand(**tables)["tasks"]["a"]["prompts"] == (alone if own == "evaluations" else "mine.jsonl")


def test_shared_rows_may_be_wanted() -> None:
    tables = {"tasks": {"a": {**SUMS, "env_split": "test", "env_shared": True}}}
    assert problems_of(**tables, evaluations={"b": {"env": SUMS["env"]}}) == ""


def test_a_file_with_wrong_environments_names_all_of_them(tmp_path: Path) -> None:
    file = tmp_path / "rollq.toml"
    file.write_text(FILE + '\n[tasks.other]\nenv = "gym:x"\nbatch_groups = 1\n[tasks.third]\nenv_shared = true\n')
    with pytest.raises(ConfigError) as error:
        load_settings(file)
    assert "tasks.other.env" in str(error.value)
    assert "tasks.third.env_shared" in str(error.value)


def test_a_file_of_rows_depends_on_all_that_the_rows_do() -> None:
    def path(options: dict[str, Any], split: str = "train", rows: int = 9) -> Path:
        return Environment("reasoning-gym:chain_sum", options, split, rows).file()

    paths = [path({}), path({"seed": 1}), path({"max_terms": 2}), path({}, split="test"), path({}, rows=8)]
    assert len(set(paths)) == 5
    assert path({}) == path({})


def test_other_packages_add_kinds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: mine\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[rollq.environments]\nmine = rollq.environments.mcp.kind:Mcp\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "mine" in kind_names()
    assert type(kind_named("mine")).__name__ == "Mcp"


def test_a_name_may_have_colons() -> None:
    assert split_env("openenv:http://127.0.0.1:8000") == ("openenv", "http://127.0.0.1:8000")
