"""Groups that grow too old: the bound, the sweep, and the order in which groups are claimed."""

import random
from dataclasses import replace

import numpy as np
import pytest

from rollq.buffer.calls.put_args import versions_of
from rollq.buffer.calls.replies.claims import Shortfall
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, GroupResult, Prompt, SamplePart, SampleStatus, VersionSpan
from support.buffer_run import World, make_sample


@pytest.mark.parametrize(("max_staleness", "interval", "last_valid"), [(0, 4, 8), (1, 4, 12), (0, 1, 5), (1, 1, 6)])
def test_xb06_a_version_expires_at_the_threshold(
    world: World, max_staleness: int, interval: int, last_valid: int
) -> None:
    world.start(4, math={"max_staleness": max_staleness, "sync_weights_interval": interval})
    world.complete(1)  # by version 4
    for step in range(5, last_valid + 1):
        assert world.buffer.counts("math").ready == 1, step
        assert isinstance(world.buffer.claim(world.held, last_valid, {"math": 2}), Shortfall)
        world.buffer.publish(world.held, step, uri="u", digest=str(step))
    assert world.buffer.counts("math").clock.step == last_valid + 1
    assert world.buffer.counts("math").ready == 0
    assert world.buffer.expire("math") == 1
    assert world.statuses() == {"expired": 1}
    world.check()


def die_before_the_tasks_hear_of_it(world: World, from_step: int) -> None:
    """Take the run as a trainer that dies before it has carried its epoch into the tasks."""
    buffer = world.buffer
    launch = (
        "other trainer",
        "torn launch",
        "nonce",
        from_step,
        "replay",
        "file:///weights",
        "digest",
        30_000,
        1,
        1,
        "",
        "{}",
    )
    buffer.call("run_begin_epoch", buffer.keys.info, buffer.incarnation, *launch)


@pytest.mark.parametrize("late", [True, False], ids=["put after the rewind", "put before it"])
def test_tokens_of_an_epoch_that_no_task_heard_of_are_no_younger_than_the_rewind(world: World, late: bool) -> None:
    world.start(math={"max_staleness": 9}).complete(8)
    for step in range(1, 5):
        world.train(step)
    world.admit(2)
    die_before_the_tasks_hear_of_it(world, 4)  # workers serve version 4 of epoch 2
    leases = world.lease(2)
    if late:
        world.begin(2, mode="return", launch_id="launch-3", takeover=True)
        assert world.put(leases, version=4, epoch=2) == [PutOutcome.COMPLETED] * 2
    else:
        assert world.put(leases, version=4, epoch=2) == [PutOutcome.COMPLETED] * 2
        world.begin(2, mode="return", launch_id="launch-3", takeover=True)
    assert [world.buffer.inspect("math", group_id)["oldest"] for group_id in (9, 10)] == ["2", "2"]
    claimed = world.claim(3, math=6)
    assert claimed.counting[0].floors.counted(2, 9) == 2
    world.check()


def test_tokens_of_an_epoch_before_the_task_joined_count_as_the_oldest(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(4)
    world.train(1)
    world.train(2)
    world.begin(1, launch_id="launch-2")
    rules = TaskRules.model_validate({"batch_groups": 1, "group_size": 2, "max_staleness": 9})
    world.buffer.register_task("late", rules)
    world.admit(1, "late")
    (lease,) = world.lease(1, "late")
    assert world.put([lease], version=2, epoch=1) == [PutOutcome.COMPLETED]
    assert world.buffer.inspect("late", 1)["oldest"] == "0"
    world.train(2)
    assert world.claim(3, late=1).counting[0].floors == Floors(((1, 0),))


@pytest.mark.parametrize("seed", range(3))
def test_floors_stay_few_and_cap_every_token_that_is_young_enough_to_count(world: World, seed: int) -> None:
    rng, threshold = random.Random(seed), 3
    world.start(math={"max_staleness": threshold - 1, "max_uncheckpointed_steps": 9}).complete(2)
    starts = [0]  # of epochs 1, 2, ...
    for launch in range(60):
        clock = world.buffer.clock("math")
        world.train(clock.committed + 1)
        world.complete(2)
        if rng.random() < 0.3:
            world.buffer.checkpoint(world.held, rng.randint(clock.checkpoint, clock.committed))
        clock = world.buffer.clock("math")
        starts.append(rng.randint(clock.history, clock.committed))
        world.begin(starts[-1], mode="return", launch_id=f"launch {launch}")
        clock = world.buffer.clock("math")
        assert len(clock.floors.caps) <= clock.committed - clock.history + threshold + 1
        oldest_that_counts = clock.history + 1 - threshold
        for epoch in range(1, clock.epoch):
            floor = min(starts[epoch:])  # of all epochs that began after it
            assert max(clock.floors.counted(epoch, 1000), oldest_that_counts) == max(floor, oldest_that_counts)
        assert clock.floors.counted(clock.epoch, 1000) == 1000
    world.check()


def test_a_stale_group_is_never_claimed_even_before_the_sweep(world: World) -> None:
    world.start(math={"max_staleness": 0})
    world.complete(2)
    world.buffer.publish(world.held, 1, uri="u", digest="1")
    assert world.statuses() == {"completed": 2}
    assert isinstance(world.buffer.claim(world.held, 2, {"math": 1}), Shortfall)


@pytest.mark.parametrize(("expiry", "kept"), [("member", [True, False]), ("group", [False, False])])
def test_xb08_expiry_resets_stale_members_or_the_whole_group(world: World, expiry: str, kept: list[bool]) -> None:
    world.start(math={"expiry": expiry, "max_staleness": 0})
    world.admit(1)
    (lease,) = world.lease(1)
    world.buffer.put([GroupResult(lease, (make_sample(1), make_sample(0)))])
    world.buffer.publish(world.held, 1, uri="u", digest="1")
    assert world.buffer.expire("math") == 1
    world.check()
    assert world.buffer.recycle("math", epoch=1, target=10, limit=5) == 1
    (again,) = world.lease(1)
    assert [sample.status is SampleStatus.COMPLETED for sample in again.samples] == kept
    assert again.prompt.content == lease.prompt.content


def expire_at(world: World, version: int) -> None:
    """Publish a version, sweep, and send everything back to workers."""
    world.buffer.publish(world.held, version, uri="u", digest=str(version))
    world.buffer.expire("math")
    assert world.buffer.recycle("math", epoch=1, target=10, limit=5) == 1


@pytest.mark.parametrize("partial_rollout", [True, False])
def test_the_frame_of_a_whole_group_is_kept_while_one_of_its_samples_counts(
    world: World, partial_rollout: bool
) -> None:
    """One sample is too old and made anew, then the other one; an interrupted one is stored beside the frame."""
    world.start(math={"expiry": "member", "max_staleness": 0, "partial_rollout": partial_rollout}).admit(1)
    rollout, buffer = task_keys(world.buffer.run, "math").rollout(1), world.buffer
    fresh, old = make_sample(1), make_sample(0)
    (lease,) = world.lease(1)
    buffer.put([GroupResult(lease, (fresh, old))])
    expire_at(world, 1)
    assert buffer.client.hkeys(rollout) == [b"all"]
    (lease,) = world.lease(1)
    assert [len(sample.segments) for sample in lease.samples] == [1, 0]
    buffer.put([GroupResult(lease, (lease.samples[0], make_sample(2, status="a")))])
    assert set(buffer.client.hkeys(rollout)) == {b"all", b"1"}
    world.check()
    expire_at(world, 2)
    left = {b"1"} if partial_rollout else set()
    assert set(buffer.client.hkeys(rollout)) == left, "the first sample is too old now, and nothing of the frame counts"
    world.check()
    (lease,) = world.lease(1)
    assert buffer.put([GroupResult(lease, (make_sample(2), make_sample(2)))]) == [PutOutcome.COMPLETED]
    assert buffer.client.hkeys(rollout) == [b"all"]
    world.check()


def test_xb07_a_result_that_comes_too_late_is_stored_as_expired(world: World) -> None:
    world.start(math={"max_staleness": 0}).admit(1)
    leases = world.lease(1)
    world.buffer.publish(world.held, 1, uri="u", digest="1")
    assert world.put(leases, version=0) == [PutOutcome.EXPIRED]
    assert world.statuses() == {"expired": 1}
    assert not world.buffer.client.exists(task_keys(world.buffer.run, "math").rollout(1))
    world.check()


@pytest.mark.parametrize("put_late", [False, True])
def test_xb07_an_expired_group_says_how_stale_it_was(world: World, put_late: bool) -> None:
    world.start(math={"max_staleness": 1}).admit(1)
    leases = world.lease(1)
    if not put_late:
        world.put(leases, version=0)
    for step in (1, 2):
        world.buffer.publish(world.held, step, uri="u", digest=str(step))
    if put_late:
        world.put(leases, version=0)
    world.buffer.expire("math")
    (found,) = world.buffer.query({"status": "expired", "staleness": {"$gte": 2}}, limit=9)
    assert found.staleness == 2
    assert world.buffer.query({"status": "expired", "staleness": 0}, limit=9) == []


def test_xb09_expired_groups_can_be_dropped_and_counted(world: World) -> None:
    world.start(math={"tail_batch_trigger_size": -1, "max_staleness": 0})
    world.complete(1)
    world.admit(1)
    leases = world.lease(1)
    world.buffer.publish(world.held, 1, uri="u", digest="1")
    assert world.put(leases, version=0) == [PutOutcome.DROPPED]
    assert world.buffer.expire("math") == 1
    assert world.statuses() == {}
    assert world.buffer.counts("math").dropped == {"expired": 2}
    world.check()


def test_xb10_aborted_groups_expire_too_unless_they_have_no_tokens(world: World) -> None:
    world.start(math={"max_staleness": 0}).admit(2)
    with_tokens, without = world.lease(2)
    world.buffer.put(
        [
            GroupResult(with_tokens, (make_sample(0, status="a"), EMPTY_SAMPLE)),
            GroupResult(without, (EMPTY_SAMPLE, EMPTY_SAMPLE)),
        ]
    )
    world.buffer.publish(world.held, 3, uri="u", digest="3")
    assert world.buffer.expire("math") == 1
    assert world.statuses() == {"aborted": 1, "expired": 1}
    world.check()


@pytest.mark.parametrize(("order", "first"), [("staleness", [2, 1]), ("arrival", [1, 2])])
def test_xb12_order_is_by_staleness_or_by_arrival(world: World, order: str, first: list[int]) -> None:
    world.start(2, math={"order": order, "max_staleness": 3}).admit(2)
    newer, older = world.lease(2)
    world.put([newer], version=2)
    world.put([older], version=1)
    assert [group.group_id for group in world.claim(3).groups] == first


@pytest.mark.parametrize(("order", "taken"), [("staleness", [2, 4, 1, 3]), ("arrival", [1, 2, 3, 4])])
def test_xb12_groups_arrive_in_the_order_of_their_prompts_whichever_is_finished_first(
    world: World, order: str, taken: list[int]
) -> None:
    """XTuner orders them by the time at which they are finished, so that short answers come first."""
    world.start(2, math={"order": order, "max_staleness": 3}).admit(4)
    leases = world.lease(4)
    for index, version in ((3, 1), (2, 2), (0, 2), (1, 1)):
        world.put([leases[index]], version=version)
    assert [group.group_id for group in world.claim(3, math=4).groups] == taken


def test_fifo_never_serves_a_stale_group_that_arrived_first(world: World) -> None:
    world.start(2, math={"order": "arrival", "max_staleness": 0}).admit(3)
    first, second, third = world.lease(3)
    world.put([second, third], version=2)
    world.put([first], version=2)
    world.buffer.publish(world.held, 3, uri="u", digest="3")
    world.admit(2)
    world.put(world.lease(2, version=3), version=3)
    assert [group.group_id for group in world.claim(4).groups] == [4, 5]
    world.check()


def test_a_sample_counts_as_its_newest_token_in_the_loss() -> None:
    rules = TaskRules(batch_groups=1, max_staleness=6, max_token_staleness=3)
    spans = (VersionSpan(1, 0, 1), VersionSpan(1, 4, 1))

    def counted(loss_mask: list[bool] | None) -> int | None:
        segment = replace(make_sample(0, tokens=2).segments[0], versions=spans)
        mask = None if loss_mask is None else np.array(loss_mask)
        return versions_of(replace(make_sample(0), segments=(replace(segment, loss_mask=mask),)), Floors(), rules)[0]

    difference = rules.token_threshold - rules.stale_threshold
    assert counted(None) == counted([False, True]) == min(0, 4 + difference)
    assert counted([True, False]) == 0 + difference, "nothing would be left to train on"
    assert counted([False, False]) == min(0, 4 + difference), "masked on purpose, it is part of the baseline"


def wait_in_the_pool(world: World, versions: range) -> None:
    """Steps are trained while groups wait to be sampled again; then all of them are sent back to workers."""
    for version in versions:
        world.buffer.publish(world.held, version, uri="u", digest=str(version))
    world.buffer.recycle("math", epoch=world.held.epoch, target=10, limit=5)


@pytest.mark.parametrize("order", ["staleness", "arrival"])
@pytest.mark.parametrize(("max_staleness", "interval"), [(0, 1), (1, 1), (2, 1), (1, 2)])
def test_a_fresh_member_ages_while_its_group_waits_to_be_sampled_again(
    world: World, max_staleness: int, interval: int, order: str
) -> None:
    rules = {"max_staleness": max_staleness, "sync_weights_interval": interval, "order": order}
    world.start(math=rules).admit(1)
    threshold = (max_staleness + 1) * interval
    (lease,) = world.lease(1)
    world.buffer.publish(world.held, threshold, uri="u", digest="1")
    made = (make_sample(0), make_sample(threshold))
    assert world.buffer.put([GroupResult(lease, made)]) == [PutOutcome.EXPIRED]
    wait_in_the_pool(world, range(threshold + 1, 2 * threshold + 1))
    (again,) = world.lease(1)
    assert again.samples == (EMPTY_SAMPLE,) * 2
    world.check()
    assert world.put([again]) == [PutOutcome.COMPLETED]
    world.check()


@pytest.mark.parametrize(("expiry", "kept"), [("member", 1), ("group", 0)])
def test_interrupted_samples_age_while_their_group_waits(world: World, expiry: str, kept: int) -> None:
    world.start(math={"max_staleness": 1, "partial_rollout": True, "expiry": expiry}).admit(1)
    (lease,) = world.lease(1)
    world.buffer.publish(world.held, 1, uri="u", digest="1")
    interrupted = (make_sample(0, status="a"), make_sample(1, status="a"))
    assert world.buffer.put([GroupResult(lease, interrupted)]) == [PutOutcome.ABORTED]
    wait_in_the_pool(world, range(2, 3))  # no sweep looks at the group meanwhile
    (again,) = world.lease(1)
    assert [len(sample.segments) for sample in again.samples] == [0, kept]
    world.check()


def test_what_a_group_brought_to_a_lease_ages_after_it_was_handed_back(world: World) -> None:
    world.start(math={"max_staleness": 1, "partial_rollout": True}).admit(1)
    (lease,) = world.lease(1)
    world.buffer.put([GroupResult(lease, (make_sample(0, status="a"), EMPTY_SAMPLE))])
    wait_in_the_pool(world, range(0))
    (again,) = world.lease(1)
    assert len(again.samples[0].segments) == 1
    world.buffer.hand_back([again])
    wait_in_the_pool(world, range(1, 3))
    (third,) = world.lease(1)
    assert third.samples == (EMPTY_SAMPLE,) * 2
    world.check()


def test_a_group_keeps_nothing_that_only_a_batch_which_is_full_could_have_trained(world: World) -> None:
    world.start(math={"max_staleness": 1, "partial_rollout": True})
    world.admit(1)
    (lease,) = world.lease(1)
    world.buffer.put([GroupResult(lease, (make_sample(0, status="a"), EMPTY_SAMPLE))])
    world.buffer.publish(world.held, 1, uri="u", digest="1")
    world.complete(2)
    world.claim(2)
    wait_in_the_pool(world, range(0))
    (again,) = world.lease(1)
    assert again.group_id == lease.group_id
    assert again.samples == (EMPTY_SAMPLE,) * 2, "tokens of version 0 are too old at step 3"


@pytest.mark.parametrize("stragglers", ["wait", "expire"])
def test_an_interrupted_answer_that_is_young_enough_is_continued(world: World, stragglers: str) -> None:
    world.start(math={"max_staleness": 1, "partial_rollout": True, "stragglers": stragglers}).admit(1)
    (lease,) = world.lease(1)
    world.buffer.publish(world.held, 1, uri="u", digest="1")
    world.buffer.put([GroupResult(lease, (make_sample(0, status="a"), make_sample(1, status="a")))])
    wait_in_the_pool(world, range(0))
    (again,) = world.lease(1)
    assert [len(sample.segments) for sample in again.samples] == [1, 1]


def test_samples_are_not_made_anew_that_would_be_no_younger(world: World) -> None:
    world.start(math={"max_staleness": 0, "partial_rollout": True, "stragglers": "expire"}).admit(1)
    (lease,) = world.lease(1)
    world.buffer.put([GroupResult(lease, (make_sample(0, status="a"), EMPTY_SAMPLE))])
    wait_in_the_pool(world, range(0))
    (again,) = world.lease(1)
    assert len(again.samples[0].segments) == 1


def test_an_evaluation_keeps_what_was_salvaged_however_far_training_is(world: World) -> None:
    world.start(math={}, held_out={"kind": "eval", "partial_rollout": True, "max_staleness": 0})
    batch = world.buffer.open_batch("held_out", "eval/1", "eval", step=1)
    world.buffer.fill_batch("held_out", batch.handle, 0, [Prompt("one")], last=True)
    (lease,) = world.lease(1, "held_out")
    world.buffer.salvage([SamplePart(lease, 0, 0, 0, make_sample(0, status="a"))])
    for version in range(1, 4):
        world.buffer.publish(world.held, version, uri="u", digest=str(version))
    world.buffer.hand_back([lease])
    (again,) = world.lease(1, "held_out", version=0)
    assert len(again.samples[0].segments) == 1
    world.check()


def test_kept_tokens_of_a_dead_epoch_stay_as_old_as_the_rewind_when_others_are_salvaged(world: World) -> None:
    world.start(math={"max_staleness": 1, "partial_rollout": True, "max_uncheckpointed_steps": 9}).complete(2)
    world.train(1)
    world.complete(2)
    world.train(2)
    world.admit(1)
    (lease,) = world.lease(1)
    world.buffer.put([GroupResult(lease, (make_sample(2, status="a"), EMPTY_SAMPLE))])
    world.begin(0, mode="return", launch_id="launch-2")  # version 2 of epoch 1 counts as version 0
    world.buffer.recycle("math", epoch=2, target=10, limit=5)
    (again,) = [lease for lease in world.lease(9) if lease.group_id == 5]
    world.buffer.salvage([SamplePart(again, 0, 1, 0, make_sample(0, epoch=2, status="a"))])
    for version in (1, 2):
        world.buffer.publish(world.held, version, uri="u", digest=f"other {version}")
    world.buffer.hand_back([again])
    (third,) = [lease for lease in world.lease(9) if lease.group_id == 5]
    assert third.samples == (EMPTY_SAMPLE,) * 2
    world.check()
