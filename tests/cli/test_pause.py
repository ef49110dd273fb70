"""`rollq pause`, `rollq pause --drain` and `rollq resume`, for tasks and for workers."""

import re
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.orders import Order
from rollq.buffer.calls.replies.tasks import Control
from rollq.cli.main import main
from support.buffer_run import World

Ask = Callable[..., Result]


@pytest.fixture
def ask(server_url: str, run_name: str, buffer: Buffer) -> Ask:
    World(buffer).start(math={}, code={})

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, "--url", server_url, "--run", run_name])

    return run


def test_a_drained_task_admits_nothing_more_and_finishes_what_it_has(ask: Ask, buffer: Buffer) -> None:
    world = World(buffer)
    world.admit(1)
    assert (
        ask("pause", "--drain", "--task", "math").output
        == "task math: run -> done; production has ended, until `rollq resume --task math`\n"
    )
    assert world.admit(1) == 0
    assert len(world.lease(1)) == 1
    assert (
        ask("resume").output
        == "task code: already runs\ntask math: stays done; `rollq resume --task math` begins production again\n"
    )
    assert (
        ask("pause", "--drain", "--task", "math").output
        == "task math: has already ended; `rollq resume --task math` begins production again\n"
    )
    assert ask("resume", "--task", "math").output == "task math: done -> run\n"


def test_an_order_that_a_task_follows_already_says_so_and_keeps_its_reason(ask: Ask, buffer: Buffer) -> None:
    buffer.set_control("math", Control.PAUSE, "the disk is full")
    assert ask("pause").output == "task code: run -> pause\ntask math: is already paused\n"
    assert buffer.clock("math").control_reason == "the disk is full"


def test_a_resume_of_a_retired_task_says_how_it_comes_back(ask: Ask, buffer: Buffer) -> None:
    buffer.change_rules("math", {"batch_groups": 0}, batch_step=1)
    assert (
        ask("resume", "--task", "math").output
        == "task math: already runs; it is retired, and `rollq set math batch_groups=N` brings it back\n"
    )
    ask("pause", "--task", "math")
    back = "it is retired, and `rollq set math batch_groups=N` brings it back"
    assert ask("resume", "--task", "math").output == f"task math: pause -> run; {back}\n"


def test_a_worker_gets_its_order_with_the_next_report(ask: Ask, buffer: Buffer) -> None:
    assert buffer.report_worker("gpu1-aaaa", {}) is Order.RUN
    assert buffer.report_worker("gpu1-bbbb", {}) is Order.RUN
    assert buffer.report_worker("gpu10-cccc", {}) is Order.RUN
    assert ask("pause", "--worker", "gpu1").output == "worker gpu1-aaaa: pause\nworker gpu1-bbbb: pause\n"
    assert [buffer.report_worker(name, {}) for name in ("gpu1-aaaa", "gpu1-bbbb", "gpu10-cccc")] == [
        Order.PAUSE, Order.PAUSE, Order.RUN
    ]  # fmt: skip
    assert ask("pause", "--worker", "gpu1-bbbb").output == "worker gpu1-bbbb: pause, as before\n"
    assert ask("resume", "--worker", "gpu1-aaaa").output == "worker gpu1-aaaa: run\n"
    assert ask("resume", "--worker", "gpu10").output == "worker gpu10-cccc: run, as before\n"
    assert buffer.report_worker("gpu1-aaaa", {}) is Order.RUN
    assert ask("pause", "--drain", "--worker", "gpu1-bbbb").exit_code == 0
    assert buffer.report_worker("gpu1-bbbb", {}) is Order.DRAIN
    assert [buffer.clock(task).control for task in ("math", "code")] == [Control.RUN] * 2, "tasks go on"


def test_an_order_goes_with_its_worker(ask: Ask, buffer: Buffer) -> None:
    buffer.report_worker("gpu1-aaaa", {})
    ask("pause", "--worker", "gpu1")
    buffer.forget_worker("gpu1-aaaa")
    assert buffer.client.hgetall(buffer.keys.orders) == {}
    assert buffer.report_worker("gpu1-aaaa", {}) is Order.RUN


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worker", "gpu2"], r"--worker 'gpu2': run '.*' has the workers gpu1-aaaa"),
        (["--task", "math", "--worker", "gpu1"], "--task and --worker: give one of them"),
        (["--task", "maths"], r"task 'maths': run '.*' has the tasks code, math"),
    ],
)
@pytest.mark.parametrize("command", ["pause", "resume"])
def test_who_is_unknown_is_named(ask: Ask, buffer: Buffer, command: str, arguments: list[str], message: str) -> None:
    buffer.report_worker("gpu1-aaaa", {})
    result = ask(command, *arguments)
    assert result.exit_code == 2
    assert re.search(message, result.output)
