"""`rollq convert` on the command line."""

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rollq.cli.main import main

CONFIG = 'trainer = RLColocateTrainerConfig(total_train_steps=5, train_batch_size=8, load_from="model")\n'


def convert(*args: object) -> Result:
    return CliRunner().invoke(main, ["convert", *map(str, args)])


def test_the_file_is_printed_and_the_summary_is_apart(tmp_path: Path) -> None:
    (tmp_path / "rl.py").write_text(CONFIG)
    result = convert(tmp_path / "rl.py")
    assert result.exit_code == 0
    assert tomllib.loads(result.stdout)["trainer"]["steps"] == 5
    assert result.stderr.endswith("rl.py: 3 settings converted, 0 to replace, 0 without an equivalent, 0 with one "
                                  "outside rollq.toml: see the comments\n")  # fmt: skip


def test_a_file_is_written_and_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "rl.py").write_text(CONFIG)
    out = tmp_path / "rollq.toml"
    assert (convert(tmp_path / "rl.py", "-o", out).stdout, out.exists()) == ("", True)
    out.write_text("mine")
    again = convert(tmp_path / "rl.py", "-o", out)
    assert (again.exit_code, out.read_text()) == (2, "mine")
    assert "exists: name a new file with --output" in again.stderr


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "rollq.toml",
            b"run = 'x'",
            "a TOML file; `rollq convert` reads XTuner's Python files and Trinity-RFT's YAML files",
        ),
        ("notes.txt", b"", "neither a Python file of XTuner (.py) nor a YAML file of Trinity-RFT (.yaml, .yml)"),
        ("rl.py", b"\xff", "not UTF-8 at byte 0"),
        ("rl.py", b"#" * (1 << 20) + b"#", "larger than 1 MiB"),
        ("rl.yaml", b"a: !!python/name:os.system", "tags and unusual keys are not read"),
    ],
)
def test_another_file_is_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    result = convert(tmp_path / name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert problem in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    result = convert(tmp_path / "absent.py")
    assert result.exit_code == 2
    assert "absent.py' cannot be read: No such file or directory" in result.stderr


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    (tmp_path / "rl.py").write_text(CONFIG)
    assert "cannot be written: No such file" in convert(tmp_path / "rl.py", "-o", tmp_path / "no" / "rollq.toml").stderr
