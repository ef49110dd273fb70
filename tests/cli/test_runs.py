"""`rollq runs list` and `rollq runs delete`."""

from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.main import main
from support.buffer_run import World


def rollq(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def url(fresh_server: EmbeddedServer, run_name: str) -> str:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        World(buffer).start().complete(2)
        buffer.client.hset(buffer.keys.trainer, "deadline_ms", 1)
    return fresh_server.url


def test_runs_are_listed_for_people_and_for_programs(url: str, run_name: str) -> None:
    header, line = rollq("runs", "list", "--url", url).output.splitlines()
    assert header.split()[:4] == ["run", "tasks", "groups", "samples"]
    assert line.split()[:3] == [run_name, "math", "2"]
    assert line.endswith("nobody")
    found = orjson.loads(rollq("runs", "list", "--url", url, "--json").output)
    assert (found["run"], found["groups"], found["roles"]) == (run_name, 2, [])


def test_a_server_without_runs_says_so(fresh_server: EmbeddedServer) -> None:
    assert rollq("runs", "list", "--url", fresh_server.url).output == "no runs\n"


def test_a_run_is_deleted_only_with_yes(url: str, run_name: str) -> None:
    dry = rollq("runs", "delete", run_name, "--url", url)
    assert dry.exit_code == 0, dry.output
    assert dry.output.splitlines()[-1].startswith("nothing was deleted; add --yes")
    assert run_name in rollq("runs", "list", "--url", url).output
    assert rollq("runs", "delete", run_name, "--url", url, "--yes").output.endswith(f"deleted run '{run_name}'\n")
    assert rollq("runs", "list", "--url", url).output == "no runs\n"


def test_the_server_of_a_settings_file_may_have_another_run(
    url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (tmp_path / "rollq.toml").write_text(
        f'run = "another"\n[redis]\nbuffer_url = "{url}"\n[tasks.math]\nprompts = "prompts.jsonl"\nbatch_groups = 2\n'
    )
    monkeypatch.chdir(tmp_path)
    assert run_name in rollq("runs", "list").output
    assert rollq("runs", "delete", run_name, "--yes").exit_code == 0
    missing = rollq("runs", "delete", "another", "--yes")
    assert missing.exit_code == 2
    assert "run 'another' is not on this server: `rollq runs list` shows the runs that are" in missing.output
