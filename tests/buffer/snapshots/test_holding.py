"""What the buffer keeps while a copy of it is taken."""

import pytest

from rollq.buffer.errors import HistoryGone
from support.buffer_run import World


def test_while_a_copy_is_taken_nothing_is_dropped_or_reset(world: World) -> None:
    world.start(math={"max_staleness": 0, "resume": "fresh"}).complete(3)
    world.buffer.call_task("hold_for_saving", "math", "a save", 60_000)
    world.train(1)
    world.buffer.checkpoint(world.held, 1)
    assert world.buffer.expire("math") == 0
    assert world.statuses() == {"completed": 1, "archived": 2}
    world.buffer.call_task("hold_for_saving", "math", "a save", 0)
    assert world.buffer.expire("math") == 1
    world.buffer.checkpoint(world.held, 1)
    assert world.statuses() == {"expired": 1}
    world.check()


def test_what_a_copy_held_back_leaves_with_the_next_step_of_a_run_that_keeps_nothing(world: World) -> None:
    world.start(math={"resume": "fresh"}).complete(4)
    world.buffer.call_task("hold_for_saving", "math", "a save", 60_000)
    for step in (1, 2):
        world.train(step)
    assert world.statuses() == {"archived": 4}
    world.buffer.call_task("hold_for_saving", "math", "a save", 0)
    world.complete(2)
    world.train(3)
    assert world.statuses() == {}
    assert world.buffer.counts("math").dropped == {"trained": 6}
    with pytest.raises(HistoryGone, match="no longer kept"):
        world.claim(2)
    world.check()


def test_the_sizes_of_a_step_stay_as_long_as_its_batch_does(world: World) -> None:
    world.start(math={}, code={})
    for task in ("math", "code"):
        world.complete(2, task)
    world.train(1, math=2, code=2)
    world.buffer.call_task("hold_for_saving", "math", "a save", 60_000)
    world.buffer.call_task("hold_for_saving", "code", "a save", 60_000)
    world.buffer.checkpoint(world.held, 1)  # waits for the next one
    world.begin(0, launch_id="after a crash")
    assert len(world.claim(1, math=2).groups) == 4, "the batch of step 1 is fixed, with its part of code"


def test_while_a_copy_is_taken_a_batch_passes_over_what_is_too_old(world: World) -> None:
    world.start(math={"order": "arrival", "max_staleness": 1, "stragglers": "expire"}).complete(4)
    world.train(1)
    world.buffer.publish(world.held, 2, uri="u", digest="2")
    world.complete(3)
    world.buffer.call_task("hold_for_saving", "math", "a save", 60_000)
    assert [group.group_id for group in world.claim(3).groups] == [5, 6]
    assert world.statuses() == {"completed": 3, "claimed": 2, "archived": 2}
    world.check()
