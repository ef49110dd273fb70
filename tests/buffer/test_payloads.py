"""Frames that are too large for a function: keys in the slot of their task, which come and go with their group."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.put_args import GroupArgs, calls_of
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.errors import CorruptGroup, EpochMoved, StoreLost
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.redis_functions import Beside
from rollq.buffer.values.rollouts import BESIDE, WHOLE, GroupResult, Lease, SampleStatus, Status
from rollq.buffer.wire.group_fields import MOST_INLINE_BYTES
from support.any_server import AnyServer
from support.buffer_run import World, make_sample
from support.dropped_groups import drop_by_checkpoint, drop_by_new_samples, drop_by_release

LARGE = "y" * (MOST_INLINE_BYTES + 1)

pytestmark = pytest.mark.plain_server  # on a cluster, payloads are away: see test_payloads_away.py


def payloads(buffer: Buffer, task: str = "math") -> set[str]:
    """The keys of a task that hold payloads."""
    prefix = task_keys(buffer.run, task).prefix
    return {key.decode() for key in buffer.client.scan_iter(match=f"{prefix}payload:*", count=1000)}


def result(lease: Lease, *letters: str, version: int = 0, text: str = LARGE) -> GroupResult:
    samples = tuple(make_sample(version, status=letter, text=text) for letter in letters or "cc")
    return GroupResult(lease, samples)


def put_large(world: World, n: int = 1) -> list[Lease]:
    world.admit(n)
    leases = list(world.lease(n))
    assert world.buffer.put([result(lease) for lease in leases]) == [PutOutcome.COMPLETED] * n
    return leases


def test_a_large_frame_is_a_key_and_a_small_one_a_field(world: World) -> None:
    world.start().admit(2)
    small, large = world.lease(2)
    world.buffer.put([result(small, text=""), result(large)])
    keys = task_keys(world.buffer.run, "math")
    assert payloads(world.buffer) == {keys.payload(large.group_id, large.nonce)}
    assert world.buffer.client.hkeys(keys.rollout(small.group_id)) == [b"all"]
    assert not world.buffer.client.exists(keys.rollout(large.group_id))
    found = world.buffer.fetch(world.claim(1).groups)
    assert [group.samples[0].text for group in found] == ["", LARGE]
    world.check()


def test_many_large_results_in_one_call_are_filed_in_order(world: World) -> None:
    world.start(math={"batch_groups": 40}).admit(40)
    leases = world.lease(40)
    texts = [LARGE + str(lease.group_id) if lease.group_id % 3 else "" for lease in leases]
    found = world.buffer.put([result(lease, text=text) for lease, text in zip(leases, texts, strict=True)])
    assert found == [PutOutcome.COMPLETED] * 40
    fetched = world.buffer.fetch(world.claim(1, math=40).groups)
    assert {group.group_id: group.samples[0].text for group in fetched} == {
        lease.group_id: text for lease, text in zip(leases, texts, strict=True)
    }
    world.check()


def test_a_call_takes_four_times_as_many_bytes_of_payloads() -> None:
    frame = b"x" * 32_000
    inline = [GroupArgs([number], {WHOLE: frame}) for number in range(24)]
    beside = [GroupArgs([number], {BESIDE: b""}, {f"key {number}": 4 * frame}) for number in range(24)]
    assert [args for args, _ in calls_of(inline)] == [[*range(8)], [*range(8, 16)], [*range(16, 24)]]
    assert [args for args, _ in calls_of(beside)] == [args for args, _ in calls_of(inline)]
    assert [len(payloads) for _, payloads in calls_of(beside)] == [8, 8, 8]


def test_a_result_that_is_refused_leaves_no_payload(world: World) -> None:
    world.start().admit(1)
    leases = world.lease(1)
    world.run_out(leases)
    world.buffer.reap("math")
    assert world.buffer.put([result(leases[0])]) == [PutOutcome.REFUSED]
    assert not payloads(world.buffer)
    world.check()


def test_another_result_for_the_same_lease_does_not_replace_the_payload(world: World) -> None:
    (lease,) = put_large(world.start())
    assert world.buffer.put([result(lease, text="z" * 50_000)]) == [PutOutcome.DUPLICATE]
    (group,) = world.buffer.fetch(world.claim(1, math=1).groups)
    assert group.samples[0].text == LARGE
    world.check()


def test_of_two_results_for_the_same_lease_in_one_call_the_first_counts(world: World) -> None:
    world.start().admit(1)
    (lease,) = world.lease(1)
    first = GroupResult(lease, (make_sample(0, text=LARGE, reward=1.0),) * 2)
    second = GroupResult(lease, (make_sample(0, text=LARGE, reward=0.0),) * 2)
    assert world.buffer.put([first, second]) == [PutOutcome.COMPLETED, PutOutcome.DUPLICATE]
    claimed = world.claim(1, math=1)
    (group,) = world.buffer.fetch(claimed.groups)
    assert claimed.groups[0].reward == 1.0
    assert [sample.reward for sample in group.samples] == [1.0, 1.0]


def test_a_copy_that_arrives_when_its_group_is_gone_leaves_nothing(world: World) -> None:
    world.start(math={"batch_groups": 1})
    (lease,) = put_large(world)
    world.train(1, math=1)
    world.buffer.checkpoint(world.held, 1)
    assert not payloads(world.buffer)
    assert world.buffer.put([result(lease)]) == [PutOutcome.REFUSED]
    assert not payloads(world.buffer)


def test_a_call_of_another_epoch_leaves_no_payload_and_spares_a_live_one(world: World) -> None:
    world.start().admit(2)
    first, second = world.lease(2)
    world.buffer.put([result(first)])
    keys = task_keys(world.buffer.run, "math")
    live, new = keys.payload(first.group_id, first.nonce), keys.payload(second.group_id, second.nonce)
    call = ("put", keys.clock, world.buffer.incarnation, 99, "0:0")
    with pytest.raises(EpochMoved):
        world.buffer.call_all([Beside(call, {live: b"other", new: b"new"})])
    assert payloads(world.buffer) == {live}
    with pytest.raises(StoreLost):
        world.buffer.call_all([Beside(("put", keys.clock, "another", 1, "0:0"), {new: b"new"})])
    with pytest.raises(Exception, match="must be"):
        world.buffer.call_all([Beside(("put", keys.clock, world.buffer.incarnation, 1, "0:0", "x"), {new: b"new"})])
    assert payloads(world.buffer) == {live}
    world.check()


def test_a_result_without_the_payload_that_it_names_is_refused(world: World) -> None:
    world.start().admit(1)
    (lease,) = world.lease(1)
    numbers = [
        lease.group_id,
        1,
        lease.nonce,
        "cc",
        "0,0",
        "0,0",
        0,
        0,
        0,
        1.0,
        2,
        6,
        6,
        10,
        "",
        1,
        2,
        6,
        50_000,
        "",
        world.held.epoch,
        "",
        "",
        "[]",
        "beside",
        "",
    ]
    with pytest.raises(Exception, match="a payload that was set"):
        world.buffer.call_task("put", "math", world.held.epoch, "0:0", *numbers)
    assert world.statuses() == {"running": 1}


def test_an_epoch_that_moves_between_lease_and_put_costs_nothing(world: World) -> None:
    world.start().admit(2)
    leases = world.lease(2)
    world.buffer.put([result(leases[0])])  # the worker knows the epoch now
    other = World(world.buffer)
    other.begin(0, launch_id="another", takeover=True)
    assert world.buffer.put([result(leases[1])]) == [PutOutcome.COMPLETED]
    assert len(payloads(world.buffer)) == 2
    world.check()


@pytest.mark.parametrize("drop", [drop_by_checkpoint, drop_by_release, drop_by_new_samples])
def test_a_payload_goes_with_its_group(world: World, drop: Callable[[World], None]) -> None:
    put_large(world.start(), 2)
    assert len(payloads(world.buffer)) == 2
    drop(world)
    assert not payloads(world.buffer)
    world.check()


@pytest.mark.parametrize("expired", ["pool", "drop"])
def test_the_payload_of_a_group_that_expires_whole_is_dropped(world: World, expired: str) -> None:
    world.start(math={"batch_groups": 1, "max_staleness": 0, "tail_batch_trigger_size": 0 if expired == "pool" else -1})
    put_large(world, 3)
    world.train(1, math=1)
    world.buffer.expire("math")
    assert world.statuses() == ({"archived": 1, "expired": 2} if expired == "pool" else {"archived": 1})
    assert len(payloads(world.buffer)) == 1
    world.check()


def lease_half_expired(world: World) -> Lease:
    """A group of which one sample has expired, and the other one is still in its payload."""
    world.start(math={"batch_groups": 1, "max_staleness": 1})
    put_large(world, 3)
    world.train(1, math=1)
    world.admit(1)
    (lease,) = world.lease(1)
    world.buffer.put([GroupResult(lease, (make_sample(0, text=LARGE), make_sample(1, text="young")))])
    world.train(2, math=1)
    world.buffer.expire("math")
    world.buffer.recycle("math", epoch=world.held.epoch, target=100, limit=100, statuses=[Status.EXPIRED])
    (again,) = [each for each in world.lease(10) if each.group_id == lease.group_id]
    assert [sample.status for sample in again.samples] == [SampleStatus.PENDING, SampleStatus.COMPLETED]
    assert again.samples[1].text == "young"
    world.check()
    return again


def test_samples_that_are_young_enough_stay_in_the_payload_until_the_group_is_put(world: World) -> None:
    lease = lease_half_expired(world)
    whole = GroupResult(lease, (make_sample(2, text=LARGE), lease.samples[1]))
    assert world.buffer.put([whole]) == [PutOutcome.COMPLETED]
    mine = {key for key in payloads(world.buffer) if f":payload:{lease.group_id}:" in key}
    assert mine == {task_keys(world.buffer.run, "math").payload(lease.group_id, lease.nonce)}
    world.check()


def test_a_payload_is_dropped_when_every_sample_that_is_left_has_a_frame_of_its_own(world: World) -> None:
    lease = lease_half_expired(world)
    samples = (make_sample(2, status="a"), replace(lease.samples[1], text="put again"))
    assert world.buffer.put([GroupResult(lease, samples)]) == [PutOutcome.ABORTED]
    assert not {key for key in payloads(world.buffer) if f":payload:{lease.group_id}:" in key}
    world.check()


def test_a_group_that_is_trained_twice_has_a_payload_of_its_own(world: World) -> None:
    world.start(math={"batch_groups": 1, "max_uses": 2, "max_staleness": 8, "reuse_cooldown_steps": 0})
    put_large(world)
    world.train(1, math=1)
    world.check()
    assert len(payloads(world.buffer)) == 2
    world.buffer.checkpoint(world.held, 1)
    (group,) = world.buffer.fetch(world.claim(2, math=1).groups)
    assert group.samples[0].text == LARGE
    world.check()


def test_a_lost_payload_is_a_corrupt_group(world: World) -> None:
    put_large(world.start(), 2)
    world.buffer.client.delete(*payloads(world.buffer))
    claimed = world.claim(1)
    with pytest.raises(CorruptGroup, match="group 1 of task 'math': its samples are no longer in the store"):
        world.buffer.fetch(claimed.groups)


def test_a_snapshot_holds_payloads_and_they_are_restored(
    world: World, any_server: AnyServer, run_name: str, tmp_path: Path
) -> None:
    leases = put_large(world.start(), 2)
    world.admit(1)
    world.buffer.set_control("math", Control.PAUSE)
    world.buffer.save(tmp_path / "saved")
    with Buffer.connect(any_server.url, f"{run_name}-elsewhere") as buffer:
        elsewhere = World(buffer)
        buffer.restore(tmp_path / "saved")
        keys = task_keys(buffer.run, "math")
        assert payloads(buffer) == {keys.payload(lease.group_id, lease.nonce) for lease in leases}
        elsewhere.begin(0, launch_id="elsewhere")
        found = buffer.fetch(elsewhere.claim(1).groups)
        assert [group.samples[0].text for group in found] == [LARGE, LARGE]
        elsewhere.check()
        elsewhere.buffer.release(elsewhere.held, 1, "drop", claim_round=0)
        assert not payloads(buffer)
