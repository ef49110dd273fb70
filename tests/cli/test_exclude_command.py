"""`rollq groups exclude`: rows of a task are taken out, listed and taken in again."""

from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.tickets import open_queue
from rollq.cli.main import main
from rollq.monitor.status.read import read_status
from rollq.monitor.status.text import as_table

Rollq = Callable[..., Result]


@pytest.fixture
def rollq(server_url: str, run_name: str, buffer: Buffer) -> Rollq:
    buffer.create_run()
    for task in ("code", "math.1of2", "math.2of2"):
        buffer.register_task(task, TaskRules(batch_groups=2))
        buffer.record_prompts(task, "digest", 100, "", "p.jsonl")
        buffer.account_rows(task, "a", rows=100, passed=3, unusable=[])
    return lambda *words: CliRunner().invoke(
        main, ["groups", "exclude", *words, "--url", server_url, "--run", run_name]
    )


def test_rows_go_to_the_shards_that_have_them(rollq: Rollq, buffer: Buffer) -> None:
    assert rollq("math", "4", "17", "20").output.splitlines() == [
        "task math.1of2: rows 4, 20 excluded",
        "task math.2of2: row 17 excluded",
    ]
    assert buffer.excluded_rows("math.1of2").rows == {4, 20}
    assert rollq("math").output == "task math: 3 excluded: rows 4, 17, 20\n"
    assert rollq("math", "20", "6", "--undo").output == (
        "task math.1of2: row 20 taken in again; row 6 not excluded before\n"
    )
    assert rollq("code").output == "task code: no row is excluded\n"


def test_status_counts_them(rollq: Rollq, buffer: Buffer, server_url: str) -> None:
    rollq("code", "5", "6")
    status = read_status(buffer, open_queue(server_url, buffer.run))
    assert "code: prompts: 3 of 100 rows read, 3 used, 2 excluded" in as_table(status)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("code", "--undo"), "--undo: name the rows"),
        (("code", "x"), "ROW 'x'"),
        (("code", "100"), "row 100: the prompts of task code have the rows 0 to 99"),
        (("math.1of2", "3"), "row 3 belongs to the shard math.2of2, not to math.1of2"),
        (("none", "3"), "task 'none'"),
    ],
)
def test_wrong_rows_are_refused(rollq: Rollq, words: tuple[str, ...], error: str) -> None:
    refused = rollq(*words)
    assert refused.exit_code == 2
    assert error in refused.output
