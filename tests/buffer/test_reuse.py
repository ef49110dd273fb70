"""Groups that are trained more than once."""

from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Status
from support.buffer_run import World


def payload(world: World, step: int, **sizes: int) -> list[list[int]]:
    groups = world.buffer.fetch(world.claim(step, **sizes).groups)
    return [list(sample.segments[0].response_ids) for group in groups for sample in group.samples]


def test_a_group_is_trained_again_with_the_same_samples_and_no_more_than_max_uses(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 3}).complete(2)
    first = payload(world, 1)
    world.train(1)
    assert world.statuses() == {"completed": 2, "archived": 2}
    again = payload(world, 2)
    assert again == first
    world.train(2)
    assert world.statuses() == {"archived": 4}
    assert world.buffer.counts("math").progress["reused"] == 2
    world.check()


def test_a_group_rests_for_the_cooldown_before_it_is_trained_again(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 9, "reuse_cooldown_steps": 2}).complete(6)
    for step in (1, 2, 3):
        assert world.statuses()["completed"] >= 2
        world.train(step)
        world.check()
    # those of step 1 are back for step 4, the others still rest
    assert world.statuses() == {"completed": 2, "cooling": 4, "archived": 6}
    assert sorted(group.oldest_version for group in world.claim(4).groups) == [0, 0]


def test_no_group_is_trained_again_past_the_bound_of_staleness(world: World) -> None:
    world.start(math={"max_uses": 5, "max_staleness": 0}).complete(2)
    world.train(1)
    assert world.statuses() == {"archived": 2}


def test_one_that_grows_too_old_while_it_waits_is_dropped_and_its_prompt_not_sampled_again(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 1}).complete(2)
    world.train(1)
    world.complete(2)
    world.train(2, math=0)
    assert world.buffer.expire("math") == 2
    counts = world.buffer.counts("math")
    assert counts.dropped == {"reused": 2}
    assert counts.statuses[Status.EXPIRED] == 0
    world.check()


def test_a_replay_trains_the_same_batches_and_makes_no_second_copy(world: World) -> None:
    world.start(math={"max_uses": 3, "max_staleness": 9}).complete(2)
    batches = [payload(world, step) for step in (1, 2) if world.train(step)]
    before = world.statuses()
    world.begin(0, launch_id="after a crash")
    assert [payload(world, step) for step in (1, 2) if world.train(step)] == batches
    assert world.statuses() == before
    world.check()


def test_prompts_that_are_sampled_anew_after_a_divergence_leave_no_copy_behind(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 9}).complete(2)
    world.train(1)
    world.begin(0, mode="regenerate", launch_id="after a divergence")
    assert world.statuses() == {"pending": 2}
    assert world.buffer.counts("math").dropped == {"reused": 2}
    world.check()


def test_trained_groups_that_are_not_kept_are_trained_again_all_the_same(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 9, "resume": "fresh"}).complete(2)
    world.train(1)
    assert world.statuses() == {"completed": 2}
    world.check()


def test_copies_of_groups_are_as_old_as_their_dead_weights_count(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 9, "reuse_cooldown_steps": 4})
    for step in (1, 2, 3):
        world.complete(2)
        world.train(step)
    world.complete(2)
    world.claim(4)  # and the trainer dies before it commits
    world.begin(1, launch_id="after a crash")
    for step in (2, 3, 4):
        assert {group.staleness for group in world.buffer.query({"status": "cooling"})} <= set(range(step))
        world.train(step)
    # what versions 2 and 3 made in the dead history counts as version 1
    cooling = world.buffer.query({"status": "cooling"})
    assert sorted(group.staleness for group in cooling) == [3, 3, 3, 3, 3, 3, 4, 4]
    world.check()


def test_a_group_and_its_copy_in_one_batch_can_be_sampled_again(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 9}).complete(2)
    world.train(1)
    world.begin(0, mode="return", launch_id="returns both")
    assert [group.group_id for group in world.train(1, math=4).groups] == [1, 2, 3, 4]
    world.begin(0, mode="regenerate", launch_id="samples again")
    assert world.statuses() == {"pending": 2}
    world.check()


def test_a_copy_that_was_trained_before_its_group_keeps_its_batch(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 9}).complete(2)
    world.train(1)
    world.begin(0, mode="return", launch_id="returns both")
    client, key = world.buffer.client, task_keys(world.buffer.run, "math").status(Status.COMPLETED)
    client.zadd(key, {"1": 10**15, "2": 10**15})  # as if copies were older
    assert [group.group_id for group in world.train(1).groups] == [3, 4]
    world.train(2)
    world.begin(1, mode="regenerate", launch_id="samples the groups again")
    assert world.statuses() == {"archived": 2, "pending": 2}
    world.begin(0, launch_id="replays the copies")
    assert [group.group_id for group in world.train(1).groups] == [3, 4]
    world.check()
