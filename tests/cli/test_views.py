"""`rollq pause` and `rollq resume`."""

import pytest
from click.testing import CliRunner, Result

from rollq.buffer.replay import Buffer
from rollq.cli.main import main
from world import World


@pytest.fixture
def ask(server_url: str, run_name: str, buffer: Buffer) -> object:
    World(buffer).start(math={}, code={})

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, "--url", server_url, "--run", run_name])

    return run


def test_production_is_paused_and_goes_on(ask, buffer: Buffer) -> None:  # type: ignore[no-untyped-def]
    assert ask("pause", "--task", "math").output == "task math: run -> pause\n"
    assert [buffer.clock(task).control.value for task in ("math", "code")] == ["pause", "run"]
    assert ask("resume").output == "task code: run -> run\ntask math: pause -> run\n"
    wrong = ask("pause", "--task", "maths")
    assert (wrong.exit_code, "task 'maths'" in wrong.output) == (2, True)
