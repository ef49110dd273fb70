"""Which roles `rollq up` runs for a settings file."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollq.buffer.errors import ConfigError
from rollq.cli.settings.file import load_settings
from rollq.cli.up.roles import ROLLQ, check_roles, role_commands
from rollq.cli.up.run import run_folder

TASK = '[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 2\n'
OFFLINE = "[tasks.demos]\noffline = true\nbatch_groups = 2\n"
TRAINER = '[trainer]\nmodel = "model"\noutput = "out/trainer"\nsteps = 9\n'
ARCHIVE = '[archive]\nurl = "archive"\n'


def settings_file(folder: Path, text: str) -> Path:
    file = folder / "rollq.toml"
    file.write_text(f'run = "r"\n{text}')
    return file


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (TASK, ["producer", "worker-1", "worker-2"]),
        (TASK + TRAINER, ["trainer", "producer", "worker-1", "worker-2"]),
        (TASK + TRAINER + ARCHIVE, ["trainer", "producer", "worker-1", "worker-2", "archiver"]),
        (OFFLINE + TRAINER, ["trainer"]),
    ],
)
def test_the_roles_are_those_that_the_settings_need(text: str, names: list[str], tmp_path: Path) -> None:
    file = settings_file(tmp_path, text)
    roles = list(role_commands(load_settings(file), file, 2))
    assert [role.name for role in roles] == names
    assert [role.name for role in roles if role.finishes] == [name for name in names if name == "trainer"]
    assert all(str(file) in role.command for role in roles)


def test_the_folder_of_logs_and_data_is_beside_the_trainers_output(tmp_path: Path) -> None:
    file = settings_file(tmp_path, TASK + TRAINER)
    assert run_folder(load_settings(file), file) == tmp_path / "out"
    assert run_folder(load_settings(settings_file(tmp_path, TASK)), file) == tmp_path


def test_a_file_without_roles_is_refused(tmp_path: Path) -> None:
    file = settings_file(tmp_path, OFFLINE)
    with pytest.raises(ConfigError, match="there is nothing to run: every task has offline = true"):
        check_roles(load_settings(file), file)


@pytest.mark.parametrize("command", [(*ROLLQ, "train"), (sys.executable, "-m", "rollq.consumer.launch")])
def test_roles_import_nothing_from_the_working_folder(command: tuple[str, ...], tmp_path: Path) -> None:
    """There may be another project, with a `rewards.py` of its own."""
    (tmp_path / "click.py").write_text("raise SystemExit(77)")
    assert subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True).returncode == 0
