"""`rollq pause` and `rollq resume`."""

import pytest
from click.testing import CliRunner, Result

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.tasks import Control
from rollq.cli.main import main
from support.buffer_run import World


@pytest.fixture
def ask(server_url: str, run_name: str, buffer: Buffer) -> object:
    World(buffer).start(math={}, code={})

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, "--url", server_url, "--run", run_name])

    return run


def test_production_is_paused_and_goes_on(ask, buffer: Buffer) -> None:  # type: ignore[no-untyped-def]
    assert ask("pause", "--task", "math").output == "task math: run -> pause\n"
    assert [buffer.clock(task).control.value for task in ("math", "code")] == ["pause", "run"]
    assert ask("resume").output == "task code: already runs\ntask math: pause -> run\n"
    wrong = ask("pause", "--task", "maths")
    assert (wrong.exit_code, "task 'maths'" in wrong.output) == (2, True)


def test_an_end_outlives_a_pause_and_the_one_that_a_hook_wanted_a_resume_of_all_tasks(ask, buffer: Buffer) -> None:  # type: ignore[no-untyped-def]
    buffer.set_control("code", Control.STOPPED, "too little is kept")
    buffer.set_control("math", Control.DONE, "its hook said so")
    assert (
        ask("pause").output
        == "task code: stays stopped\ntask math: stays done; `rollq resume --task math` begins production again\n"
    )
    assert buffer.clock("code").control_reason == "too little is kept"
    assert (
        ask("resume").output
        == "task code: stopped -> run\ntask math: stays done; `rollq resume --task math` begins production again\n"
    )
    assert ask("resume", "--task", "math").output == "task math: done -> run\n"


@pytest.mark.parametrize("command", [["status"], ["groups", "query", "{}"], ["pause"], ["resume"]])
def test_numbers_are_shown_where_the_folder_of_payloads_is_not(ask, command: list[str], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("ROLLQ_PAYLOADS_URL", "/not/on/this/machine")
    shown = ask(*command)
    assert shown.exit_code == 0, shown.output
