"""Trainers that come late, go on elsewhere, or take less than a batch: steps, counters and the target stay in line."""

from collections.abc import Iterator

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Shortfall
from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import TaskRules
from support.buffer_run import World


@pytest.fixture
def world(buffer: Buffer) -> Iterator[World]:
    world = World(buffer)
    yield world
    world.check()


def test_a_trainer_that_takes_less_than_a_batch_does_not_let_groups_pile_up(world: World) -> None:
    world.start(math={"batch_groups": 4, "max_staleness": 0, "tail_batch_trigger_size": -1})
    for step in range(1, 9):
        world.admit(50, target=4 * step)
        world.put(world.lease(50))
        assert world.statuses() == {"completed": 4, "archived": 2 * (step - 1)} if step > 1 else {"completed": 4}
        world.train(step, math=2)
        world.buffer.expire("math")


def test_a_checkpoint_goes_on_in_an_empty_store(world: World) -> None:
    world.start(500)
    assert world.admit(50, target=2 * 502) == 4, "what two steps need, and nothing for the 500 before"
    world.put(world.lease(4))
    world.train(501)
    world.begin(400, launch_id="launch-2", mode="return")
    assert world.buffer.clock("math").committed == 400


def test_a_task_without_part_in_the_batch_moves_on(world: World) -> None:
    world.start(math={}, code={}).complete(4)
    world.train(1, math=2)
    world.train(2, math=2)
    assert world.buffer.clock("code").committed == 2
    world.begin(1, launch_id="launch-2")
    assert world.buffer.clock("code").committed == 1
    world.complete(2, "code")
    world.train(2, math=2)
    world.train(3, code=2)


def test_a_task_that_joins_a_running_trainer_harms_no_step(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(10)
    world.train(1)
    world.train(2)
    world.buffer.register_task("code", TaskRules(batch_groups=2, group_size=2, max_staleness=0))
    assert world.admit(50, "code", target=2 * 3) == 2, "what the next step needs"
    world.train(3, math=2)
    world.begin(1, launch_id="launch-2")
    world.train(2, math=2)


def test_a_rank_that_comes_late_takes_no_batch_back(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(6)
    world.train(1)
    world.claim(2)
    world.begin(1, launch_id="launch-2", mode="return")
    batch = world.claim(2)
    world.complete(2, version=0)
    world.begin(1, launch_id="launch-2", mode="return")
    assert world.claim(2) == batch


@pytest.mark.parametrize("again", ["release", "return"])
def test_a_replayed_batch_that_is_given_up_is_as_old_as_its_dead_weights_count(world: World, again: str) -> None:
    world.start(math={"max_staleness": 1})
    for step in (1, 2, 3, 4):
        world.complete(2)
        world.train(step)
    world.begin(0, launch_id="launch-2")
    for step in (1, 2):
        world.train(step)
    if again == "release":
        world.claim(3)
        world.buffer.release(world.held, 3, "return", claim_round=0)
    else:
        world.begin(2, launch_id="launch-3", mode="return")
    short = world.buffer.claim(world.held, 3, {"math": 2})
    assert isinstance(short, Shortfall), "versions 2 and 3 of the dead epoch count as 0"
    assert short.ready == {"math": 0}


def test_a_restart_may_ask_for_another_batch_than_the_one_that_never_filled(world: World) -> None:
    world.start(math={}, code={}).complete(2)
    world.complete(2, "code")
    with pytest.raises(ConfigError, match="0 to 1000 are possible"):
        world.buffer.claim(world.held, 1, {"code": 2, "math": 2000})
    assert isinstance(world.buffer.claim(world.held, 1, {"math": 5, "code": 2}), Shortfall)
    world.begin(0, launch_id="launch-2")
    world.train(1, math=2, code=2)
