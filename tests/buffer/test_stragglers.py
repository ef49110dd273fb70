"""Long answers, which a batch waits for."""

from rollq.buffer.calls.replies.claims import Shortfall
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.values.rollouts import GroupResult
from support.buffer_run import World, make_sample


def test_a_batch_waits_for_groups_that_the_next_would_find_too_old(world: World) -> None:
    world.start(math={"max_staleness": 0})
    world.admit(3)
    slow, *quick = world.lease(3)
    world.put(quick)
    assert world.buffer.claim(world.held, 1, {"math": 2}) == Shortfall(1, {"math": 2}, {"math": 2}, {"math": 1})
    world.put([slow])
    world.claim(1)


def test_a_batch_does_not_wait_for_groups_that_are_young_enough_for_the_next(world: World) -> None:
    world.start(math={"max_staleness": 1})
    world.admit(3)
    _, *quick = world.lease(3)
    world.put(quick)
    world.claim(1)


def test_a_batch_waits_for_nobody_when_stragglers_may_expire(world: World) -> None:
    world.start(math={"max_staleness": 0, "stragglers": "expire"})
    world.admit(3)
    _, *quick = world.lease(3)
    world.put(quick)
    world.claim(1)


def test_kept_tokens_of_an_interrupted_group_say_how_old_it_will_be(world: World) -> None:
    world.start(math={"max_staleness": 1, "partial_rollout": True})
    world.admit(3)
    slow, *quick = world.lease(3)
    assert world.put([slow], status="a") == [PutOutcome.ABORTED]
    world.put(quick)
    world.train(1)
    clock = world.buffer.clock("math")
    assert world.buffer.recycle("math", epoch=clock.epoch, target=99, limit=9) == 1
    (slow,) = world.lease(1)
    world.complete(2)
    assert world.buffer.readiness("math", 2) == (2, 1, 0)
    world.put([slow], version=0)
    assert world.buffer.readiness("math", 2) == (3, 0, 0)


def test_samples_that_were_reset_do_not_say_how_old_a_group_will_be(world: World) -> None:
    world.start(math={"max_staleness": 1}).admit(1)
    (lease,) = world.lease(1)
    for version in (1, 2, 3):
        world.buffer.publish(world.held, version, uri="u", digest=str(version))
    assert world.buffer.put([GroupResult(lease, (make_sample(0), make_sample(2)))]) == [PutOutcome.EXPIRED]
    assert world.buffer.recycle("math", epoch=world.held.epoch, target=10, limit=1) == 1
    assert len(world.lease(1)) == 1
    assert world.buffer.readiness("math", 4) == (0, 1, 0), "the sibling that stayed is of version 2, too old for step 5"
    assert world.buffer.readiness("math", 3) == (0, 0, 0)


def test_a_group_that_a_dead_worker_held_is_not_waited_for(world: World) -> None:
    world.start(math={"max_staleness": 0})
    world.admit(1)
    leases = world.lease(1)
    assert world.buffer.readiness("math", 1) == (0, 1, 0)
    world.buffer.hand_back(leases)
    assert world.buffer.readiness("math", 1) == (0, 0, 0)
