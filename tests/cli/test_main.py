import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rollq.cli.main import COMMANDS, RENAMED, main


def rollq(*args: str, **environment: str) -> Result:
    return CliRunner().invoke(main, args, env=environment)


@pytest.mark.parametrize("minutes", ["nan", "inf"])
def test_a_demo_without_an_end_is_refused(minutes: str, tmp_path: Path) -> None:
    result = rollq("demo", "--minutes", minutes, "--out", str(tmp_path / "demo"))
    assert result.exit_code == 2
    assert f"--minutes {minutes}: must be a finite number" in result.output
    assert not (tmp_path / "demo").exists()


def test_a_demo_has_a_number_of_steps_or_a_time(tmp_path: Path) -> None:
    result = rollq("demo", "--minutes", "2", "--steps", "5", "--out", str(tmp_path / "demo"))
    assert result.exit_code == 2
    assert "leave out --steps or --minutes" in result.output
    assert not (tmp_path / "demo").exists()


def test_a_synchronous_demo_that_is_to_be_stale_is_refused(tmp_path: Path) -> None:
    result = rollq("demo", "--strategy", "sync", "--max-staleness", "2", "--out", str(tmp_path / "demo"))
    assert result.exit_code == 2
    assert "--max-staleness 2: with --strategy sync every batch is on policy" in result.output
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    result = rollq(name, "--help")
    assert result.exit_code == 0
    assert f"  rollq {name}" in result.output.partition("Example:")[2]


def test_help_lists_every_command_without_loading_any() -> None:
    code = (
        "import sys; from rollq.cli.main import main\n"
        "try: main(['--help'])\n"
        "finally: print([m for m in ('torch', 'numpy', 'redis', 'rq', 'pydantic') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("[]")
    assert all(f"\n  {name}  " in result.stdout for name in COMMANDS)


def test_help_has_five_groups_of_commands() -> None:
    lines = rollq("--help").stdout.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Options:", "Run:", "Watch:", "Steer:", "Data:", "Server:"]
    assert next(line for line in lines[lines.index("Watch:") :] if line.startswith("  ")).startswith("  status ")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_does_not_import_torch(name: str) -> None:
    code = (
        "import sys; from rollq.cli.main import main\n"
        f"try: main([{name!r}, '--help'])\n"
        "finally: print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("False")


def test_the_version_is_told() -> None:
    assert rollq("--version").output.startswith("rollq ")


def test_a_misspelt_command_gets_a_suggestion() -> None:
    result = rollq("produse", "rollq.toml")
    assert (result.exit_code, "Did you mean 'produce'?" in result.output) == (2, True)


@pytest.mark.parametrize(("name", "today"), RENAMED.items())
def test_a_former_command_says_how_to_write_it_today(name: str, today: str) -> None:
    result = rollq(name, "rollq.toml")
    assert (result.exit_code, f"No such command {name!r}. Write `rollq {today}`." in result.output) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["groups", "query", "{}", "a.toml"],
            "'a.toml': FILE is the first argument: `rollq groups query [FILE] QUERY`",
        ),
        (["set", "math", "x=1", "-f", "a.toml"], "No such option '-f'. FILE is the first argument."),
        (["snapshot", "save", "a", "b"], "Got unexpected extra argument (b); FILE ends in .toml"),
        (["snapshot", "save", "a.toml"], "Missing argument 'FOLDER'."),
        (["produce"], "there is no rollq.toml in this folder: name the file of the run"),
        (["try"], "there is no rollq.toml in this folder: name the file of the run"),
    ],
)
def test_the_file_is_the_first_argument(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = rollq(*words)
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_a_misspelt_option_gets_a_suggestion() -> None:
    result = rollq("status", "--jsn")
    assert (result.exit_code, "--json" in result.output) == (2, True)


@pytest.mark.parametrize("role", ["produce", "work", "train", "status"])
def test_bad_settings_end_every_command_with_one_line_and_status_2(role: str, tmp_path: Path) -> None:
    result = rollq(role, str(tmp_path / "none.toml"))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: settings file ")
    assert result.stderr.count("\n") == 1


def settings_file(folder: Path, more: str = "") -> str:
    path = folder / "rollq.toml"
    path.write_text('run = "r"\n[tasks.a]\nprompts = "a.jsonl"\nbatch_groups = 1\n' + more)
    return str(path)


@pytest.mark.parametrize(
    ("args", "more", "message"),
    [
        (["train"], "", "needs a table [trainer]"),
        (["train"], '[trainer]\nmodel = "m"\noutput = "o"\nsteps = 1\n', "trainer.model: cannot read "),
        (["work"], '[worker.options]\nmodel = "m"\n', "worker.options.model: cannot read "),
        (["work", "--name", "a b"], "", "--name 'a b': 1 to 32 characters"),
        (["work"], '[worker]\nname = "a b"\n', "worker.name = 'a b': "),
        (["produce"], "", "a.jsonl' cannot be read"),
        (["produce"], "[producr]\n", "producr: unknown key; did you mean 'producer'?"),
    ],
)
def test_a_role_that_makes_no_sense_is_not_started(args: list[str], more: str, message: str, tmp_path: Path) -> None:
    name, *options = args
    result = rollq(name, settings_file(tmp_path, more), *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("args", [["--url", "redis://x"], ["--run", "r"], ["a.toml", "--run", "r"]])
def test_a_view_wants_either_a_file_or_a_url_with_a_run(args: list[str]) -> None:
    result = rollq("status", *args)
    assert (result.exit_code, result.stderr) == (
        2,
        "error: give either FILE (rollq.toml), or both --url and --run\n",
    )


@pytest.mark.parametrize("command", ["status", "pause"])
def test_without_a_place_the_file_of_this_folder_is_meant(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = rollq(command)
    assert (result.exit_code, result.stderr) == (
        2,
        "error: there is no rollq.toml in this folder: name the file of the run, or give --url and --run\n",
    )
    (tmp_path / "rollq.toml").write_text('run = "r"\n[redis]\nbuffer_url = 7\n')
    assert "redis.buffer_url" in rollq(command).stderr


def test_a_server_that_nobody_runs_is_a_clear_error_after_a_moment() -> None:
    result = rollq("status", "--url", "redis://127.0.0.1:1/0", "--run", "r")
    assert result.exit_code == 1
    assert "error: redis://127.0.0.1:1/0" in result.stderr


def test_a_url_that_makes_no_sense_is_refused_without_its_password() -> None:
    result = rollq("status", "--url", "http://:hunter2@host", "--run", "r")
    assert result.exit_code == 2
    assert "must begin with redis://" in result.stderr
    assert "hunter2" not in result.output


@pytest.mark.parametrize(
    "command", [["status"], ["doctor"], ["groups", "query", "{}"], ["snapshot", "save", "d"], ["snapshot", "load", "d"],
                ["pause"], ["resume"],
                ["set", "math"], ["doctor", "--load-functions"]]
)  # fmt: skip
def test_every_command_warns_of_a_password_in_its_arguments(command: list[str]) -> None:
    result = rollq(*command, "--url", "http://:hunter2@host", "--run", "r")
    warning, error = result.stderr.splitlines()
    assert warning.startswith("warning: --url contains a password")
    assert "ROLLQ_REDIS_PASSWORD_FILE" in warning
    assert error.startswith("error: server URL")
    assert "hunter2" not in result.output


def test_no_other_url_is_warned_of_and_the_output_stays_clean(tmp_path: Path) -> None:
    from rollq.buffer.store.embedded_server import EmbeddedServer

    with EmbeddedServer(tmp_path, password="hunter2") as server:
        place = ("doctor", "--run", "r", "--json", "--url")
        well = rollq(*place, server.url.replace("://", "://default@"), ROLLQ_REDIS_PASSWORD="hunter2")
        assert (well.exit_code, well.stderr) == (3, "")
        warned = rollq(*place, server.url.replace("://", "://:hunter2@"))
    assert (warned.exit_code, warned.stderr.count("\n")) == (3, 1)
    assert warned.stdout.startswith("{")


def test_a_wrong_password_is_a_clear_error_that_does_not_show_it(tmp_path: Path) -> None:
    from rollq.buffer.store.embedded_server import EmbeddedServer

    with EmbeddedServer(tmp_path, password="right") as server:
        result = rollq("status", "--url", server.url, "--run", "r", ROLLQ_REDIS_PASSWORD="hunter2")
        assert result.exit_code == 1
        assert "ROLLQ_REDIS_PASSWORD" in result.stderr
        assert "hunter2" not in result.output


def test_a_run_that_is_not_there_is_a_clear_error(server_url: str, run_name: str) -> None:
    result = rollq("status", "--url", server_url, "--run", run_name)
    assert result.exit_code == 1
    assert f"run {run_name!r} is not in this store: it was never created here" in result.stderr


def test_a_run_name_that_is_no_name_is_refused(server_url: str) -> None:
    result = rollq("status", "--url", server_url, "--run", "a:b{c}*")
    assert (result.exit_code, "run name 'a:b{c}*'" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--bind", "0.0.0.0"], "a server that others can reach needs a password"),
        (["--bind", "here"], "must be an IP address"),
        (["--password-env", "ROLLQ_NOT_SET"], "'ROLLQ_NOT_SET': this environment variable is not set"),
        (["--port", "0"], "--port"),
    ],
)
def test_a_server_that_makes_no_sense_is_not_started(args: list[str], message: str, tmp_path: Path) -> None:
    result = rollq("redis", "--dir", str(tmp_path / "d"), *args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_command_names_the_option_of_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = CliRunner().invoke(main, ["redis", "--dir", str(tmp_path / "file" / "data")])
    assert found.exit_code == 2
    assert found.stderr.startswith("error: --dir: server directory ")
