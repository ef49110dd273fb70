"""Weights that are published again after a rewind: tokens that they made count as they did, and no others do."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Shortfall
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.calls.replies.trainer import LiveModel
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import GroupResult, Prompt
from support.any_server import AnyServer
from support.buffer_run import World, make_sample, payloads_in


def digest_of(weights: str) -> str:
    return sha256(weights.encode()).hexdigest()


def publish(world: World, version: int, weights: str = "same") -> None:
    """Publish weights as a version. Those of the same name are the same for each version."""
    world.buffer.publish(world.held, version, uri="u", digest=digest_of(f"{weights} {version}"))


def train(world: World, step: int, weights: str = "same") -> None:
    world.claim(step)
    publish(world, step, weights)
    world.buffer.commit(world.held, step)


def counts_as(world: World, group_id: int) -> int:
    return int(world.buffer.inspect("math", group_id)["oldest"])


def scored(world: World) -> Mapping[int, int]:
    """The versions of groups in the index by which they are claimed and expire."""
    found: Any = world.buffer.client.zrange(task_keys(world.buffer.run, "math").by_version, 0, -1, withscores=True)
    return {int(group_id): int(score // 2**32) for group_id, score in found}


@pytest.fixture
def ahead(world: World) -> World:
    """Version 2 is live, and groups 5 and 6 are of it."""
    world.start(math={"max_staleness": 4, "partial_rollout": True}).complete(4)
    train(world, 1)
    train(world, 2)
    world.complete(2)
    return world


def restart(world: World, from_step: int = 0, mode: str = "replay") -> None:
    world.begin(from_step, mode=mode, launch_id=f"launch after {world.held.epoch}")


def test_groups_count_as_they_did_once_their_weights_are_published_again(ahead: World) -> None:
    restart(ahead)
    assert (counts_as(ahead, 5), scored(ahead)) == (0, {5: 0, 6: 0})
    train(ahead, 1)
    assert (counts_as(ahead, 5), scored(ahead)) == (1, {5: 1, 6: 1})
    train(ahead, 2)
    assert (counts_as(ahead, 5), scored(ahead)) == (2, {5: 2, 6: 2})
    claimed = ahead.claim(3)
    assert [group.oldest_version for group in claimed.groups] == [2, 2]
    assert all(counting.floors.counted(1, 2) == 2 for counting in claimed.counting)
    assert all(counting.floors.counted(1, 3) == 2 for counting in claimed.counting)
    ahead.check()


def test_groups_stay_as_old_as_the_last_version_that_was_published_alike(ahead: World) -> None:
    restart(ahead)
    train(ahead, 1)
    train(ahead, 2, "other")
    publish(ahead, 3)
    assert scored(ahead) == {5: 1, 6: 1}
    assert [group.oldest_version for group in ahead.claim(3).groups] == [1, 1]


@pytest.mark.parametrize("digest", ["", "2", "x" * 64, digest_of("weights")[:-1]])
def test_a_digest_that_is_no_sha256_proves_nothing(world: World, digest: str) -> None:
    world.start(math={"max_staleness": 4})
    world.buffer.publish(world.held, 1, uri="u", digest=digest)
    world.complete(1)
    restart(world)
    world.buffer.publish(world.held, 1, uri="u", digest=digest)
    assert counts_as(world, 1) == 0


def test_tokens_of_each_epoch_count_by_its_own_weights(ahead: World) -> None:
    """A trainer in between has published other weights as version 2."""
    restart(ahead)
    train(ahead, 1)
    train(ahead, 2, "other")
    ahead.complete(1)
    restart(ahead)
    train(ahead, 1)
    assert scored(ahead) == {5: 1, 6: 1, 7: 1}
    train(ahead, 2, "other")
    assert scored(ahead) == {5: 1, 6: 1, 7: 2}
    restart(ahead)
    train(ahead, 1)
    train(ahead, 2)
    assert scored(ahead) == {5: 1, 6: 1, 7: 1}, "it is not known any more that the first epoch had published them"
    ahead.check()


def test_a_rewind_in_the_middle_of_a_replay_loses_nothing(ahead: World) -> None:
    for _ in range(3):
        restart(ahead)
        train(ahead, 1)
    assert scored(ahead) == {5: 1, 6: 1}
    train(ahead, 2)
    assert scored(ahead) == {5: 2, 6: 2}


def test_weights_of_a_checkpoint_that_differ_from_the_recorded_ones_are_another_version(ahead: World) -> None:
    restart(ahead, 2)  # with other weights, such as those of another dtype
    ahead.complete(1)
    restart(ahead)
    train(ahead, 1)
    train(ahead, 2)
    assert scored(ahead) == {5: 1, 6: 1, 7: 1}


def take_run(world: World, from_step: int, digest: str) -> None:
    """A trainer takes the run, and dies before it has announced that."""
    buffer, nonce = world.buffer, f"torn at {from_step}"
    live = buffer.clock("math").epoch
    buffer.call(
        "run_begin_epoch", buffer.keys.info, buffer.incarnation, "other", nonce, nonce, from_step, "replay", "u",
        digest, 30_000, 1, live, "", "{}",
    )  # fmt: skip
    while buffer.call_task("task_begin_epoch", "math", live + 1, nonce, from_step)[0]:
        pass


def test_weights_that_a_trainer_began_with_and_never_announced_count_as_published(ahead: World) -> None:
    take_run(ahead, 2, digest_of("other 2"))
    ahead.admit(1)
    ahead.put(ahead.lease(1, version=2), version=2, epoch=2)
    restart(ahead)
    train(ahead, 1)
    train(ahead, 2)
    assert scored(ahead) == {5: 1, 6: 1, 7: 1}


def test_weights_that_only_the_run_heard_of_count_as_published(ahead: World) -> None:
    """A trainer dies after workers can have its weights, and before a task has heard of them."""
    restart(ahead)
    train(ahead, 1)
    held, other = ahead.held, digest_of("other 2")
    ahead.buffer.call(
        "run_publish", ahead.buffer.keys.info, ahead.buffer.incarnation, held.epoch, held.nonce, 2, "u", other
    )
    ahead.admit(1)
    ahead.put(ahead.lease(1, version=2), version=2)
    restart(ahead)
    train(ahead, 1)
    train(ahead, 2)
    assert scored(ahead) == {5: 1, 6: 1, 7: 1}


def test_an_epoch_of_an_older_rollq_proves_nothing(ahead: World) -> None:
    """It has published whatever it has, and has noted nothing of it."""
    restart(ahead)
    ahead.buffer.client.hset(ahead.buffer.keys.trainer, "traced", 1)
    restart(ahead)
    train(ahead, 1)
    train(ahead, 2)
    assert scored(ahead) == {5: 0, 6: 0}


def test_what_a_checkpoint_covers_is_forgotten(ahead: World) -> None:
    ahead.buffer.checkpoint(ahead.held, 2)
    assert ahead.buffer.client.hkeys(ahead.buffer.keys.published) == [b"2"]


@pytest.mark.parametrize("again", [True, False])
def test_results_that_come_before_and_after_weights_are_published_again(ahead: World, again: bool) -> None:
    ahead.admit(3)
    early, late, mixed = ahead.lease(3)
    restart(ahead)
    assert ahead.put([early], version=2, epoch=1) == [PutOutcome.COMPLETED]
    assert scored(ahead)[early.group_id] == 0
    for version in (1, 2):
        train(ahead, version, "same" if again else "other")
    assert ahead.put([late], version=2, epoch=1) == [PutOutcome.COMPLETED]
    ahead.buffer.put([GroupResult(mixed, (make_sample(2, epoch=1), make_sample(2, epoch=2)))])
    now = 2 if again else 0
    assert [scored(ahead)[lease.group_id] for lease in (early, late, mixed)] == [now, now, now]
    ahead.check()


def test_a_sweep_finds_groups_that_are_young_again_before_the_trainer_does(world: World) -> None:
    world.start(math={"max_staleness": 0}).complete(2)
    train(world, 1)
    world.complete(1)
    restart(world)
    world.claim(1)
    held, buffer = world.held, world.buffer
    buffer.call(
        "run_publish", buffer.keys.info, buffer.incarnation, held.epoch, held.nonce, 1, "u", digest_of("same 1")
    )
    assert buffer.call_task("task_publish", "math", held.epoch, held.nonce, 1, 1) == 1
    assert scored(world) == {3: 0}
    assert buffer.expire("math") == 0
    assert scored(world) == {3: 1}
    world.check()


def test_a_batch_that_is_replayed_stays_as_old_as_it_was_at_its_first_claim(ahead: World) -> None:
    first = ahead.claim(3)
    restart(ahead)
    for mode in (1, 2):
        train(ahead, mode, "other")
    again = ahead.claim(3)
    assert (
        [group.oldest_version for group in first.groups] == [group.oldest_version for group in again.groups] == [2, 2]
    )
    ahead.buffer.release(ahead.held, 3, "return", claim_round=again.claim_round)
    assert scored(ahead) == {5: 0, 6: 0}


def test_a_batch_claimed_in_the_middle_of_a_replay_counts_by_what_was_published_until_then(ahead: World) -> None:
    restart(ahead, mode="return")
    assert isinstance(ahead.buffer.claim(ahead.held, 1, {"math": 7}), Shortfall)
    claimed = ahead.claim(1, math=6)
    assert [group.oldest_version for group in claimed.groups] == [0] * 6
    publish(ahead, 1)
    publish(ahead, 2)
    again = ahead.claim(1, math=6)
    assert [group.oldest_version for group in again.groups] == [0] * 6
    assert again.counting == claimed.counting


def test_groups_that_were_not_corrected_by_a_trainer_that_died_are_by_the_next(ahead: World) -> None:
    """The next one resumes from a later checkpoint, which some of them are not younger than."""
    take_run(ahead, 0, digest_of("other 0"))
    restart(ahead, 2)
    assert scored(ahead) == {5: 0, 6: 0}


@pytest.mark.parametrize("weights", ["same", "other"])
def test_samples_that_are_too_old_since_other_weights_were_published_are_reset(ahead: World, weights: str) -> None:
    restart(ahead)
    for version in range(1, 6):
        publish(ahead, version, weights)
    assert ahead.buffer.expire("math") == (0 if weights == "same" else 2)
    if weights == "other":
        assert ahead.buffer.recycle("math", epoch=ahead.held.epoch, target=10**6, limit=2) == 2
        assert [len(sample.segments) for lease in ahead.lease(2) for sample in lease.samples] == [0] * 4
    ahead.check()


@pytest.mark.parametrize(("weights", "outcome"), [("same", PutOutcome.GATHERED), ("other", PutOutcome.RESTARTED)])
def test_an_evaluation_takes_tokens_of_its_weights_alone(ahead: World, weights: str, outcome: PutOutcome) -> None:
    rules = {"batch_groups": 1, "group_size": 2, "max_staleness": 4, "kind": "eval"}
    ahead.buffer.register_task("held_out", TaskRules.model_validate(rules))
    restart(ahead)
    publish(ahead, 1, weights)
    publish(ahead, 2, weights)
    batch = ahead.buffer.open_batch("held_out", "eval", "eval", step=2)
    ahead.buffer.fill_batch("held_out", batch.handle, 0, [Prompt("one")], last=True)
    assert ahead.put(ahead.lease(1, "held_out"), version=2, epoch=1) == [outcome]


def test_copies_that_cool_are_as_young_as_their_weights(world: World) -> None:
    world.start(math={"max_staleness": 4, "max_uses": 2, "reuse_cooldown_steps": 1})
    publish(world, 1)
    world.complete(4)
    restart(world)
    world.claim(1)
    world.buffer.commit(world.held, 1)
    assert (world.statuses()["cooling"], counts_as(world, 5)) == (2, 0)
    publish(world, 1)
    assert counts_as(world, 5) == 1
    world.claim(2)
    world.buffer.commit(world.held, 2)
    assert scored(world) == {5: 1, 6: 1}


def test_a_task_that_joins_in_a_replay_counts_by_the_weights_too(ahead: World) -> None:
    restart(ahead)
    rules = {"batch_groups": 1, "group_size": 2, "max_staleness": 4}
    ahead.buffer.register_task("late", TaskRules.model_validate(rules))
    ahead.admit(1, "late")
    ahead.put(ahead.lease(1, "late"), version=2, epoch=1)
    assert ahead.buffer.inspect("late", 1)["oldest"] == "0"
    publish(ahead, 1)
    publish(ahead, 2)
    assert ahead.buffer.inspect("late", 1)["oldest"] == "2"


def test_a_restored_run_counts_groups_as_they_did_when_it_was_saved(
    ahead: World, any_server: AnyServer, tmp_path: Path
) -> None:
    restart(ahead)
    train(ahead, 1)
    ahead.buffer.save(tmp_path / "saved")
    payloads = payloads_in(tmp_path / "payloads")
    with Buffer.connect(any_server.url, f"{ahead.buffer.run}-again", payloads=payloads) as buffer:
        buffer.restore(tmp_path / "saved")
        restored = World(buffer)
        restored.held = ahead.held
        restored.begin(0, launch_id="restored")
        for version in (1, 2):
            publish(restored, version)
        assert scored(restored) == {5: 0, 6: 0}, "a snapshot has no proof of what was published"


# -- workers ----------------------------------------------------------------------------------------------------------


def live(world: World) -> LiveModel:
    found = world.buffer.live_model()
    assert found is not None
    return found


def test_workers_may_keep_weights_that_a_replay_will_publish_again(ahead: World) -> None:
    served = (1, 2, digest_of("same 2"))
    assert not live(ahead).awaits(*served)
    restart(ahead, 1)
    assert live(ahead).awaits(*served)
    assert not live(ahead).awaits(1, 2, digest_of("other 2"))
    assert not live(ahead).awaits(1, 1, digest_of("same 1")), "the live ones are as new"
    publish(ahead, 2)
    assert not live(ahead).awaits(*served), "they are live"


@pytest.mark.parametrize("mode", ["return", "regenerate"])
def test_nothing_is_awaited_of_a_trainer_that_does_not_replay(ahead: World, mode: str) -> None:
    restart(ahead, mode=mode)
    assert not live(ahead).awaits(1, 2, digest_of("same 2"))


def test_nothing_is_awaited_once_a_replay_publishes_other_weights(ahead: World) -> None:
    restart(ahead)
    train(ahead, 1, "other")
    assert not live(ahead).awaits(1, 2, digest_of("same 2"))
    restart(ahead)
    assert not live(ahead).awaited, "nor in the next replay"
    train(ahead, 1, "other")
    restart(ahead)
    assert live(ahead).awaits(3, 1, digest_of("other 1")), "until one publishes the same"
