"""`rollq runs acl`."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from rollq.buffer.store.library import digest, function_name
from rollq.buffer.store.users import USERS, Role, password_digest
from rollq.cli.main import main


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "rollq.toml"
    path.write_text('run = "r"\n[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 1\n')
    return path


def rollq(*arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    result = CliRunner().invoke(main, list(map(str, arguments)))
    return result.exit_code, result.stdout, result.stderr


def test_acl_makes_a_password_per_user_and_prints_none(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "passwords"
    folder.mkdir()
    (folder / "worker").write_text("chosen\n")
    status, printed, said = rollq("runs", "acl", config, "--passwords", folder)
    assert status == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(USERS)
    made = {path.name: path.read_text().strip() for path in folder.iterdir()}
    assert made["worker"] == "chosen"
    assert {oct((folder / name).stat().st_mode & 0o777) for name in set(made) - {"worker"}} == {"0o600"}
    assert all(f"user r-{name} reset on #{password_digest(password)} " in printed for name, password in made.items())
    assert not [password for password in made.values() if password in printed + said]
    assert rollq("runs", "acl", config, "--passwords", folder)[1] == printed
    (folder / "monitor").write_text("\n")
    status, printed, said = rollq("runs", "acl", config, "--passwords", folder)
    assert (status, printed) == (2, "")
    assert "is empty" in said


def test_acl_keeps_the_passwords_of_an_older_rollq_and_adds_those_it_lacked(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "passwords"
    rollq("runs", "acl", config, "--passwords", folder)
    older = {role: (folder / role).read_text() for role in Role}
    for name in ("admin", "replica"):
        (folder / name).unlink()
    status, printed, said = rollq("runs", "acl", config, "--passwords", folder)
    assert status == 0
    assert {role: (folder / role).read_text() for role in Role} == older
    admin, replica = (password_digest((folder / name).read_text().strip()) for name in ("admin", "replica"))
    assert printed.splitlines()[-2:] == [
        f"user r-admin reset on #{admin} ~* &* +@all",
        f"user r-replica reset on #{replica} +psync +replconf +ping",
    ]
    assert "r-operator, r-archiver, r-admin, r-replica; their passwords are in" in said


def test_acl_also_allows_the_functions_of_other_releases(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "passwords"
    also = ("--also", "0123456789ab", "--also", "ba9876543210")
    status, printed, _ = rollq("runs", "acl", config, "--passwords", folder, *also)
    assert status == 0
    for release in (digest(), "0123456789ab", "ba9876543210"):
        assert f"+fcall|{function_name('put', release)} " in printed
    assert "0123456789ab" not in rollq("runs", "acl", config, "--passwords", folder)[1]


@pytest.mark.parametrize("release", ["rollq_5", "0123456789AB", "0123456789abc"])
def test_acl_refuses_what_is_no_digest(config: Path, tmp_path: Path, release: str) -> None:
    status, printed, said = rollq("runs", "acl", config, "--passwords", tmp_path / "passwords", "--also", release)
    assert (status, printed) == (2, "")
    assert f"--also {release!r}: must be the 12 hexadecimal digits that `rollq doctor` prints" in said
    assert not (tmp_path / "passwords").exists()


def test_a_password_folder_that_cannot_be_written_is_named_with_its_option(config: Path) -> None:
    folder = config / "passwords"
    status, printed, said = rollq("runs", "acl", config, "--passwords", folder)
    assert (status, printed) == (2, "")
    assert said == f"error: --passwords {str(folder)!r}: cannot be written: Not a directory\n"


def test_a_password_file_that_cannot_be_read_is_named(config: Path, tmp_path: Path) -> None:
    (tmp_path / "passwords" / "worker").mkdir(parents=True)
    status, _, said = rollq("runs", "acl", config, "--passwords", tmp_path / "passwords")
    assert status == 2
    assert f"password file {str(tmp_path / 'passwords' / 'worker')!r}: cannot be read: " in said
