"""`rollq env`: what it lists, shows, writes and finds."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from rollq.cli.main import main
from rollq.environments import check as checking
from support.waiting import PATIENCE_S

CHAIN_SUM = "reasoning-gym:chain_sum"
FILE = """\
run = "sums"

[tasks.sums]
env = "reasoning-gym:chain_sum"
sampling.top_p = 0.9
batch_groups = 2
"""


def env(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["env", *map(str, arguments)])


def test_kinds_are_listed_with_versions() -> None:
    lines = env("list").output.splitlines()
    kinds = ["harbor", "mcp", "openenv", "reasoning-gym", "text", "verifiers"]
    assert [line.split()[0] for line in lines] == kinds
    assert "0.1.25" in lines[3]


def test_names_of_a_kind_are_listed() -> None:
    names = env("list", "reasoning-gym").output.split()
    assert len(names) == 106
    assert "chain_sum" in names


def test_a_kind_without_a_list_says_so() -> None:
    assert "mcp has no list of names: give one as mcp:NAME" in env("list", "mcp").output


def test_the_keys_that_env_sets_are_shown_as_toml(tmp_path: Path) -> None:
    file = tmp_path / "rollq.toml"
    file.write_text(FILE)
    shown = env("show", file, "sums")
    assert shown.exit_code == 0, shown.output
    assert 'judge = "rollq.environments.reasoning_gym.judge.JUDGE"' in shown.output
    assert "sampling.top_p = 0.9" in shown.output
    plain = tmp_path / "plain.toml"
    plain.write_text('run = "sums"\n' + shown.output)
    assert "judge_options = " in shown.output
    from rollq.cli.settings.file import load_settings

    assert load_settings(plain).tasks["sums"].judge == load_settings(file).tasks["sums"].judge


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'run = "x\n', "not TOML"),
        (b"\xff", "not UTF-8"),
        (b"tasks = 3\n", "no task or evaluation of"),
        (b'[tasks]\na = 3\nb = "c"\n', "no task or evaluation of"),
    ],
)
def test_a_file_that_has_nothing_to_show_is_one_clear_error(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "rollq.toml"
    file.write_bytes(content)
    shown = env("show", file)
    assert shown.exit_code != 0
    assert words in shown.output
    assert isinstance(shown.exception, SystemExit)


def test_what_is_shown_is_toml_with_the_same_values(tmp_path: Path) -> None:
    file = tmp_path / "rollq.toml"
    values = 'agent_options = { a = "🦄\\u007f\\n", b = 2026-01-01, c = 1e300, d = inf, e = 07:30:00, f = ["\\\\"] }\n'
    file.write_text(FILE + values, "utf-8")
    shown = env("show", file)
    assert shown.exit_code == 0, shown.output
    task = tomllib.loads(shown.output)["tasks"]["sums"]
    assert task["agent_options"] == tomllib.loads(values)["agent_options"]


def test_rows_that_cannot_be_made_name_their_task(tmp_path: Path) -> None:
    file = tmp_path / "rollq.toml"
    file.write_text(FILE + "\n[tasks.sums.env_options]\nmax_terms = 1\n")
    tried = CliRunner().invoke(main, ["try", str(file)])
    assert 'tasks.sums: env = "reasoning-gym:chain_sum": env_options of chain_sum: max_terms must be' in tried.output


def test_rows_are_written_once(tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    written = env("export", CHAIN_SUM, file, "--rows", 7, "-o", "max_terms=2")
    assert written.output.startswith(f"wrote 7 rows to {file}")
    assert {"prompt", "answer", "env"} == set(orjson.loads(file.read_bytes().splitlines()[0]))
    again = env("export", CHAIN_SUM, file)
    assert again.exit_code != 0
    assert "exists already" in again.output


@pytest.mark.long
def test_a_check_says_what_it_finds_and_fails_for_errors() -> None:
    good = env("check", CHAIN_SUM, "--rows", 20, "--json")
    assert good.exit_code == 0
    assert {each["level"] for each in orjson.loads(good.stdout)["findings"]} == {"note"}
    bad = env("check", "reasoning-gym:game_of_life_halting", "--rows", 10)
    assert bad.exit_code == 1
    assert "rubbish scores 1 for all questions" in bad.output
    assert "1 error: fix that before you train on it" in bad.output


STUCK = """\
import time
from pathlib import Path

SEEN = Path(__file__).with_name("seen")


class Stuck:
    def reset(self, seed=None):
        with SEEN.open("a+") as seen:
            seen.seek(0)
            seeds = seen.read().split()
            if str(seed) not in seeds and len(seeds) >= 16:
                time.sleep(3600)
            print(seed, file=seen)
        return f"Guess {seed}.", {}

    def step(self, action):
        return "", 1.0, True, False, {}
"""


@pytest.mark.long
def test_a_check_of_rows_that_take_for_ever_says_how_far_it_is_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stuck_games.py").write_text(STUCK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(checking, "REPORT_S", 0.05)
    for limit_s in (10.0, 100.0, PATIENCE_S):  # a slow machine needs more to make any
        (tmp_path / "seen").unlink(missing_ok=True)
        monkeypatch.setattr(checking, "MAKING_S", limit_s)
        checked = env("check", "text:stuck_games.Stuck", "--split", "test", "--rows", 200)
        if "there are no rows" not in checked.output:
            break
    said = next(line for line in checked.output.splitlines() if "rows were checked" in line)
    made = int(said.split()[1])
    assert said == f"warning {made} of 200 rows were checked: making more takes longer than {limit_s:g} s"
    assert "text:stuck_games.Stuck: 0 of 200 rows are made" in checked.output
    assert f"text:stuck_games.Stuck: {made} rows are checked" in checked.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("check", "chain_sum"), "write a kind and a name"),
        (("check", "reasoning-gym:no_such"), "has no generator 'no_such'"),
        (("check", "reasoning-gym:chain_sun"), "shows all names; did you mean 'chain_sum'?"),
        (("check", CHAIN_SUM, "-o", "max_termz=3"), "env_options.max_termz: unknown key; chain_sum has "),
        (("check", CHAIN_SUM, "-o", "max_termz=3"), "; did you mean 'max_terms'?"),
        (("check", CHAIN_SUM, "-o", "rows=3"), "--option rows: use --rows"),
        (("check", CHAIN_SUM, "-o", "max_terms"), "--option 'max_terms': write KEY=VALUE"),
        (("list", "gym"), "unknown kind 'gym'"),
    ],
)
def test_wrong_arguments_are_one_clear_error(arguments: tuple[str, ...], words: str) -> None:
    result = env(*arguments)
    assert result.exit_code != 0
    assert words in result.output


GAMES = """\
class Guess:
    def reset(self, seed=None):
        return f"Guess {seed}.", {}

    def step(self, action):
        return "", 1.0, True, False, {}
"""
OWN_CLASS = """\
run = "games"

[tasks.guess]
env = "text:own_games.Guess"
env_options = { rows = 3 }
batch_groups = 1
"""


def test_a_class_beside_the_settings_file_is_found_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "own_games.py").write_text(GAMES)
    file = tmp_path / "rollq.toml"
    file.write_text(OWN_CLASS)
    command = [sys.executable, "-c", "from rollq.cli.main import main; main()"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder, arguments in (
        (elsewhere, ("try", str(file))),
        (tmp_path, ("env", "check", "text:own_games.Guess", "--rows", "4")),
    ):
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        done = subprocess.run([*command, *arguments], cwd=folder, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["env", "export", "mcp:http://127.0.0.1:1/mcp", "rows.jsonl"], "has no rows: its prompts are yours"),
        (["init", "mine", "--env", "mcp:http://127.0.0.1:1/mcp"], "has no prompts: run `rollq init` without it"),
        (["init", "mine", "--env", "reasoning-gym:boxnet"], "its grader gives its own answers 0"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_server_is_asked(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0
    assert words in result.output
    assert list(tmp_path.iterdir()) == []
