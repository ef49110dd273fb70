"""Admission: the target and repeated calls."""

from rollq.buffer.values.rollouts import Prompt
from support.buffer_run import World


def test_admission_stops_at_the_target(world: World) -> None:
    world.start()
    assert world.admit(5, target=3) == 3
    assert world.admit(5, target=3) == 0
    assert world.buffer.counts("math").progress["cursor"] == 3
    world.check()


def test_what_was_trained_still_counts_against_the_target(world: World) -> None:
    world.start().complete(2)
    world.train(1)
    assert world.admit(5, target=3) == 1


def test_a_repeated_admission_admits_nothing_and_tells_the_cursor(world: World) -> None:
    world.start()
    prompts = [(Prompt("a"), 1), (Prompt("b"), 2)]
    first = world.buffer.admit("math", prompts, epoch=1, cursor=0, target=10, step=1)
    again = world.buffer.admit("math", prompts, epoch=1, cursor=0, target=10, step=1)
    assert (first.count, first.first_id, first.cursor) == (2, 1, 2)
    assert (again.count, again.cursor) == (0, 2)


def test_a_producer_of_an_old_epoch_admits_nothing(world: World) -> None:
    world.start()
    world.begin(0, launch_id="launch-2")
    assert world.buffer.admit("math", [(Prompt("a"), 1)], epoch=1, cursor=0, target=10, step=1).count == 0
