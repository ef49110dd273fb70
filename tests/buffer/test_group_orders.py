"""An operator drops a group, has it sampled anew, or quarantines it, and nobody else brings it back."""

from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.orders import GroupOrder, Ordered, Refusal
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.values.rollouts import Prompt, Status
from support.buffer_run import World
from support.finished_groups import finished_groups

QUARANTINED = "quarantined by hand"


@pytest.fixture
def world(buffer: Buffer) -> World:
    return World(buffer).start(math={"max_staleness": 4})


def test_a_running_group_that_is_dropped_is_not_brought_back_by_its_worker(world: World) -> None:
    world.admit(1)
    leases = world.lease(1)
    assert world.buffer.order_group("math", 1, GroupOrder.DROP) == Ordered(Status.RUNNING, None)
    assert world.buffer.renew(leases).gone == list(leases)
    assert world.put(leases) == [PutOutcome.REFUSED]
    assert world.buffer.hand_back(leases) == 0
    assert world.statuses() == {}
    assert world.buffer.counts("math").dropped == {"by_hand": 1}
    assert world.buffer.order_group("math", 1, GroupOrder.DROP) == Ordered(None, Refusal.GONE)
    world.check()


def test_a_quarantined_group_keeps_its_samples_until_it_is_released_or_dropped(world: World) -> None:
    world.complete(2)
    for group_id in (1, 2):
        assert world.buffer.order_group("math", group_id, GroupOrder.QUARANTINE).refusal is None
    (first,) = world.buffer.look("math", [1])
    assert (first.status, first.fields["error"], len(first.samples[0].segments)) == (Status.FAILED, QUARANTINED, 1)
    counts = world.buffer.counts("math")
    assert (counts.failed_in_a_row, counts.last_error) == (0, None)
    assert world.buffer.order_group("math", 1, GroupOrder.QUARANTINE) == Ordered(Status.FAILED, Refusal.STATUS)
    world.buffer.order_group("math", 1, GroupOrder.REQUEUE)
    world.buffer.order_group("math", 2, GroupOrder.DROP)
    (released,) = world.buffer.look("math", [1])
    assert (released.status, "error" in released.fields) == (Status.PENDING, False)
    assert [sample.segments for sample in released.samples] == [(), ()]
    world.check()
    assert world.put(world.lease(1)) == [PutOutcome.COMPLETED]
    world.check()


def test_a_group_that_is_sampled_anew_comes_before_later_ones(world: World) -> None:
    world.complete(2)
    world.admit(2)
    world.buffer.order_group("math", 2, GroupOrder.REQUEUE)
    assert [lease.group_id for lease in world.lease(2)] == [2, 3]
    world.check()


def test_a_group_that_workers_died_with_is_tried_alone_when_it_is_released(buffer: Buffer) -> None:
    world = World(buffer).start(math={"max_deaths": 2})
    world.admit(1)
    for _ in range(2):
        leases = world.lease(1)
        buffer.renew(leases)
        world.run_out(leases)
        buffer.reap("math")
    assert world.statuses() == {"failed": 1}
    buffer.order_group("math", 1, GroupOrder.REQUEUE)
    (lease,) = world.lease(1)
    assert lease.alone
    world.check()


def test_a_group_in_the_hands_of_the_trainer_stays_there(world: World) -> None:
    world.complete(2)
    world.claim(1)
    for order in GroupOrder:
        assert world.buffer.order_group("math", 1, order) == Ordered(Status.CLAIMED, Refusal.STATUS)
    world.train(1)
    for order in GroupOrder:
        assert world.buffer.order_group("math", 1, order) == Ordered(Status.ARCHIVED, Refusal.STATUS)
    assert world.statuses() == {"archived": 2}


def test_a_group_of_a_batch_stays_until_the_batch_has_ended(world: World) -> None:
    buffer = world.buffer
    batch = buffer.open_batch("math", "batch", "train", step=1)
    buffer.fill_batch("math", batch.handle, 0, [Prompt("one")], last=True)
    assert buffer.order_group("math", 1, GroupOrder.DROP) == Ordered(Status.PENDING, Refusal.BATCH)
    buffer.begin_finalize("math", batch.handle, "mine", lease_s=600)
    buffer.end_finalize("math", batch.handle, "mine", b"{}", {})
    assert buffer.order_group("math", 1, GroupOrder.DROP) == Ordered(Status.ABORTED, None)
    world.check()


def test_a_group_that_was_inserted_is_not_sampled_anew(buffer: Buffer) -> None:
    world = World(buffer).start(demos={"offline": True})
    buffer.insert("demos", finished_groups(1), source="expert")
    assert buffer.order_group("demos", 1, GroupOrder.REQUEUE) == Ordered(Status.COMPLETED, Refusal.UNSAMPLED)
    assert len(buffer.fetch(world.claim(1, demos=1).groups)) == 1


def test_a_group_of_an_evaluation_that_has_ended_is_not_sampled_anew(buffer: Buffer) -> None:
    world = World(buffer).start(test={"kind": "eval", "max_tries": 1})
    batch = buffer.open_batch("test", "evaluation", "eval", step=0)
    buffer.fill_batch("test", batch.handle, 0, [Prompt("one")], last=True)
    buffer.hand_back(world.lease(1, "test"), counted=True, error="broken")
    assert world.statuses("test") == {"failed": 1}
    buffer.abort_batch("test", batch.handle, "an end")
    assert buffer.order_group("test", 1, GroupOrder.REQUEUE) == Ordered(Status.FAILED, Refusal.UNSAMPLED)
    assert buffer.order_group("test", 1, GroupOrder.DROP) == Ordered(Status.FAILED, None)
    world.check()


def test_a_dry_run_says_what_would_happen_and_changes_nothing(world: World) -> None:
    world.complete(1)
    before = world.buffer.inspect("math", 1)
    for order in GroupOrder:
        assert world.buffer.order_group("math", 1, order, dry_run=True) == Ordered(Status.COMPLETED, None)
    assert world.buffer.inspect("math", 1) == before


def test_a_dropped_group_goes_to_the_archive_with_its_lease(buffer: Buffer) -> None:
    world = World(buffer).start(math={"archive": True})
    world.admit(1)
    world.lease(1)
    buffer.order_group("math", 1, GroupOrder.DROP)
    (group,) = buffer.look("math", [1])
    assert (group.status, group.fields["left"], group.leases[0].end) == (Status.LEAVING, "by_hand", "dropped")
    world.check()


def test_while_the_buffer_is_saved_no_group_is_moved_by_hand(world: World) -> None:
    world.complete(1)
    world.buffer.call_task("hold_for_saving", "math", "a save", 600_000)
    assert world.buffer.order_group("math", 1, GroupOrder.DROP) == Ordered(Status.COMPLETED, Refusal.SAVING)
    world.buffer.call_task("hold_for_saving", "math", "a save", 0)
    assert world.buffer.order_group("math", 1, GroupOrder.DROP) == Ordered(Status.COMPLETED, None)


def test_a_snapshot_has_what_was_dropped_and_quarantined(
    world: World, run_name: str, server_url: str, tmp_path: Path
) -> None:
    world.complete(3)
    world.buffer.order_group("math", 1, GroupOrder.DROP)
    world.buffer.order_group("math", 2, GroupOrder.QUARANTINE)
    world.buffer.order_group("math", 3, GroupOrder.REQUEUE)
    world.buffer.save(tmp_path / "saved")
    with Buffer.connect(server_url, f"{run_name}-2") as other:
        other.restore(tmp_path / "saved")
        restored = other.counts("math")
        assert (restored.unaccounted, restored.dropped) == (0, {"by_hand": 1})
        assert other.inspect("math", 2)["error"] == QUARANTINED
        assert other.inspect("math", 3)["status"] == "pending"
