"""`rollq groups`: orders for groups by name and by query."""

import re
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.orders import GroupOrder, Ordered, Refusal
from rollq.buffer.values.rollouts import Status
from rollq.cli.groups import orders
from rollq.cli.groups.orders import named_groups, order_groups
from rollq.cli.main import main
from support.buffer_run import World

Rollq = Callable[..., Result]


@pytest.fixture
def world(buffer: Buffer) -> World:
    """Two completed groups, and a pending one, of each task."""
    world = World(buffer).start(math={}, code={})
    for task in ("math", "code"):
        world.complete(2, task)
        world.admit(1, task)
    return world


@pytest.fixture
def rollq(server_url: str, run_name: str, world: World) -> Rollq:
    return lambda *words: CliRunner().invoke(main, ["groups", *words, "--url", server_url, "--run", run_name])


def statuses(world: World, task: str = "math") -> dict[str, int]:
    return {status.value: number for status, number in world.buffer.counts(task).statuses.items() if number}


def test_a_group_is_sampled_again_once_that_is_confirmed(rollq: Rollq, world: World) -> None:
    asked = rollq("requeue", "math/1", "math/3", "math/9")
    assert asked.exit_code == 1, asked.output
    assert asked.output.splitlines() == [
        "math/9: it is not in the buffer",
        "math/3: Nothing changes: it is pending: it has nothing to keep, and a worker samples it anyway.",
        "requeue: 1 completed",
        "nothing was changed; --yes makes the change without asking",
    ]
    assert rollq("requeue", "math/1", "--dry-run", "--yes").output.endswith("nothing was changed\n")
    assert statuses(world) == {"pending": 1, "completed": 2}
    done = rollq("requeue", "math/1", "--yes").output.splitlines()[-1]
    assert done == "done: requeue: 1 completed"
    assert statuses(world) == {"pending": 2, "completed": 1}


def test_a_script_learns_that_a_group_it_names_was_not_moved(rollq: Rollq) -> None:
    for names, status in ((("math/1",), 0), (("math/2", "math/3"), 1), (("math/9",), 1)):
        done = rollq("requeue", *names, "--yes")
        assert done.exit_code == status, done.output
    assert rollq("requeue", "math/9", "--yes", "--dry-run").exit_code == 0
    assert rollq("requeue", "--query", '{"task": "code"}', "--yes").exit_code == 0
    done = rollq("requeue", "--query", '{"task": "math", "step": 999}')
    assert done.exit_code == 0, done.output


def test_a_query_names_groups_of_all_tasks(rollq: Rollq, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "MOST_GROUPS", 3)
    some = rollq("quarantine", "--query", '{"status": "completed"}', "--dry-run")
    assert some.output.splitlines() == [
        "quarantine: 3 completed",
        "and more: one order moves at most 3 groups; repeat it for the rest",
        "nothing was changed",
    ]
    monkeypatch.undo()
    asked = rollq("quarantine", "--query", '{"status": "completed"}')
    assert (asked.exit_code, asked.output) == (
        1,
        "quarantine: 4 completed\nnothing was changed; --yes makes the change without asking\n",
    )
    done = rollq("drop", "--query", '{"status": {"$in": ["completed", "pending"]}, "task": "code"}', "--yes")
    assert "done: drop: 2 completed, 1 pending" in done.output
    assert (statuses(world, "code"), statuses(world)) == ({}, {"pending": 1, "completed": 2})
    found = rollq("drop", "--query", '{"prompt": {"$contains": "no such prompt"}}', "--yes")
    assert found.output == "drop: no group\nnothing was changed\n"


def test_a_group_that_has_moved_since_it_was_found_is_left(world: World) -> None:
    found = named_groups(world.buffer, ["math/1", "math/2"])
    world.buffer.order_group("math", 1, GroupOrder.QUARANTINE)
    outcome = order_groups(world.buffer, GroupOrder.REQUEUE, found.groups, dry_run=False)
    assert dict(outcome.moved) == {"completed": 1}
    assert outcome.left == {"math/1": "Nothing changes: its status has changed in the meantime."}
    ordered = world.buffer.order_group("math", 1, GroupOrder.REQUEUE, expected=Status.COMPLETED)
    assert ordered == Ordered(Status.FAILED, Refusal.MOVED)
    assert world.buffer.order_group("math", 1, GroupOrder.REQUEUE, expected=Status.FAILED).refusal is None


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "give either TASK/NUMBER"),
        (("math/1", "--query", "{}"), "give either TASK/NUMBER"),
        (("math",), "'math': name a group as TASK/NUMBER, such as math/12"),
        (("math/x",), "'math/x': name a group as TASK/NUMBER"),
        (("maths/1",), "task 'maths': the run has code, math"),
        (("--query", "{"), "QUERY '{': not JSON"),
        (("--query", '{"statsu": 1}'), "statsu"),
        (tuple(f"math/{number}" for number in range(1, 1002)), "1,001 groups: give at most 1,000 at a time"),
    ],
)
def test_a_wrong_choice_of_groups_is_refused(rollq: Rollq, words: tuple[str, ...], error: str) -> None:
    refused = rollq("drop", *words)
    assert refused.exit_code != 0
    assert re.search(re.escape(error), refused.output)
