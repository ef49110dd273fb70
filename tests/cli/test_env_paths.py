"""Relative paths in `env` and `env_options` start at the folder of rollq.toml, wherever a command runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from rollq.buffer.errors import ConfigError
from rollq.cli.settings.environment_rows import identities, write_missing_prompts
from rollq.cli.settings.file import load_settings
from rollq.cli.settings.model import RollqSettings
from rollq.workers.groups.agent_loops import make_loop
from support.mcp_servers import PROGRAM

GAMES = """\
class Guess:
    def __init__(self, most=3):
        self.most = most

    def reset(self, seed=None):
        return f"Guess {seed} up to {self.most}.", {}

    def step(self, action):
        return "", 1.0, True, False, {}
"""
FILE = """\
run = "games"

[tasks.guess]
env = "text:own_games.Guess"
env_options = { episodes = "data/episodes.jsonl", python = "pythons/python" }
batch_groups = 1

[tasks.shell]
env = "harbor:tasks"
env_options = { command = ["sh", "agent.sh"] }
batch_groups = 1

[tasks.desk]
env = "mcp:python3 desk.py stdio"
env_options = { only = ["calculator"] }
prompts = "data/questions.jsonl"
judge = "last_number"
batch_groups = 1

[tasks.other]
prompts = "data/questions.jsonl"
rows.image_folders = ["pictures"]
judge = "last_number"
agent_loop = "tools"
agent_options.tools.desk = { mcp = "python3 desk.py stdio", only = ["calculator"] }
batch_groups = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a rollq.toml with all kinds that take paths."""
    folder = tmp_path / "run"
    files = {
        "rollq.toml": FILE,
        "own_games.py": GAMES,
        "data/episodes.jsonl": '{"most": 7}\n{"most": 8}\n',
        "tasks/hello/instruction.md": "Write a greeting.",
        "tasks/hello/task.toml": "",
        "tasks/hello/environment/draft": "Hullo",
        "tasks/hello/tests/test.sh": "echo 1 > /logs/verifier/reward.txt",
        "desk.py": PROGRAM.read_text(),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "pythons").mkdir()
    (folder / "pythons/python").symlink_to(sys.executable)
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # python3 of the server
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


def files_of_rows(settings: RollqSettings) -> list[str]:
    return [str(each.file()) for each in settings.environments.values() if each.makes_rows]


def test_rows_are_made_from_any_folder(folder: Path, elsewhere: Path) -> None:
    command = [sys.executable, "-c", "from rollq.cli.main import main; main()", "try", "../run/rollq.toml", "guess"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=elsewhere, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    texts = [path.read_bytes() for path in (folder / "environments").iterdir()]
    rows = [orjson.loads(line) for text in texts for line in text.splitlines()]
    assert any(row["prompt"].endswith("up to 7.") for row in rows)
    assert any(row["prompt"] == "Write a greeting." for row in rows)


def test_workers_get_paths_that_are_true_in_any_folder(folder: Path, elsewhere: Path) -> None:
    settings = load_settings(Path("../run/rollq.toml"))
    guess, shell, desk, other = (settings.tasks[name] for name in ("guess", "shell", "desk", "other"))
    assert Path(guess.agent_options["options"]["python"]).samefile(sys.executable)
    assert shell.judge_options["folder"] == str(shell.agent_options["workspace"])
    for path in (shell.judge_options["folder"], desk.agent_options["tools"]["server"]["folder"], *other.image_folders):
        assert Path(path).is_absolute()
    assert "environment of tasks.desk" in identities(settings)  # which starts the server
    make_loop(desk.agent_loop, desk.agent_options)
    make_loop(other.agent_loop, other.agent_options)


@pytest.mark.parametrize(
    ("changed", "task"),
    [
        ("data/episodes.jsonl", "guess"),
        ("own_games.py", "guess"),
        ("tasks/hello/instruction.md", "shell"),
        ("tasks/hello/tests/test.sh", "shell"),
    ],
)
def test_a_changed_file_makes_other_rows(folder: Path, changed: str, task: str) -> None:
    before = load_settings(folder / "rollq.toml")
    known = identities(before, with_rows=True)
    (folder / changed).write_text((folder / changed).read_text() + "\n")
    after = load_settings(folder / "rollq.toml")
    other = {name for name in before.tasks if before.tasks[name].prompts != after.tasks[name].prompts}
    assert other == {task}
    assert identities(after, with_rows=True) != known


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_games.Gues", "own_games.py has no 'Gues'; did you mean 'Guess'?"),
        ("own_games.deep.Guess", "no module own_games.deep in "),
    ],
)
def test_a_class_that_is_not_in_the_code_beside_the_file_is_refused(folder: Path, name: str, words: str) -> None:
    (folder / "rollq.toml").write_text(FILE.replace("own_games.Guess", name))
    with pytest.raises(ConfigError) as refused:
        load_settings(folder / "rollq.toml")
    assert f'tasks.guess.env = "text:{name}": ' in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.parametrize("code", ["from others import Guess", "from os import *", "Guess = object", "def Guess(): ..."])
def test_a_class_may_come_from_anywhere(folder: Path, code: str) -> None:
    (folder / "own_games.py").write_text(f"if True:\n    {code}\n")
    load_settings(folder / "rollq.toml")


def test_a_role_that_makes_no_rows_needs_no_episodes(folder: Path) -> None:
    (folder / "data/episodes.jsonl").unlink()
    settings = load_settings(folder / "rollq.toml")
    assert "episodes missing" in identities(settings, with_rows=True)["environment of tasks.guess"]
    with pytest.raises(ConfigError, match=r"tasks\.guess: .*env_options\.episodes = .*No such file"):
        write_missing_prompts(settings, folder / "rollq.toml")


def test_other_folders_have_the_same_rows(folder: Path, elsewhere: Path) -> None:
    shutil.copytree(folder, elsewhere / "copy", symlinks=True)
    assert files_of_rows(load_settings(Path("copy/rollq.toml"))) == files_of_rows(load_settings(folder / "rollq.toml"))
