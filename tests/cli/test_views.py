"""`rollq query`, `pause` and `resume`, as processes see them."""

from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from rollq.buffer.replay import Buffer
from rollq.cli.main import main
from world import World


@pytest.fixture
def ask(server_url: str, run_name: str, buffer: Buffer) -> object:
    World(buffer).start(math={}, code={}).complete(3, "math")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, "--url", server_url, "--run", run_name])

    return run


def test_groups_are_shown_as_a_table(ask) -> None:  # type: ignore[no-untyped-def]
    found = ask("query", '{"status": "completed", "uid": {"$lte": 2}}')
    assert found.output.splitlines() == [
        "task  uid  status     staleness  arrival  reward  tries",
        "math  1    completed  0          1        1.000   1",
        "math  2    completed  0          2        1.000   1",
    ]
    assert ask("query", "{}", "--limit", "1").output.splitlines()[-1] == "and more: see --limit and --count"
    assert ask("query", '{"status": "failed"}').output == "no groups\n"


def test_groups_are_counted_and_listed_for_programs(ask) -> None:  # type: ignore[no-untyped-def]
    assert ask("query", "{}", "--count").output == "3\n"
    (line,) = ask("query", '{"uid": 2}', "--json").output.splitlines()
    assert orjson.loads(line) == {
        "uid": 2, "task": "math", "status": "completed", "staleness": 0, "arrival": 2, "reward": 1.0, "tries": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "message"),
    [("{", "error: QUERY '{': not JSON"), ('{"colour": 1}', "error: unknown field 'colour': there are uid, task")],
)
def test_a_query_that_makes_no_sense_is_one_error(ask, query: str, message: str) -> None:  # type: ignore[no-untyped-def]
    found = ask("query", query)
    assert found.exit_code == 2
    assert found.output.startswith(message)


def test_without_a_file_the_one_in_this_folder_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(main, ["query", "{}"])
    assert "rollq.toml" in found.output
    assert found.exit_code == 2


def test_production_is_paused_and_goes_on(ask, buffer: Buffer) -> None:  # type: ignore[no-untyped-def]
    assert ask("pause", "--task", "math").output == "task math: run -> pause\n"
    assert [buffer.clock(task).control.value for task in ("math", "code")] == ["pause", "run"]
    assert ask("resume").output == "task code: run -> run\ntask math: pause -> run\n"
    wrong = ask("pause", "--task", "maths")
    assert (wrong.exit_code, "task 'maths'" in wrong.output) == (2, True)
