"""Batches that are gathered as a whole: evaluations, and those of a coordinator."""

import numpy as np
import orjson
import pytest

from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.errors import BatchOver
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import GroupResult, PipelineOutput, Prompt
from support.buffer_run import World, make_sample


def open_evaluation(world: World, prompts: int = 2) -> str:
    state = world.buffer.open_batch("held_out", "0/held_out", "eval", step=0)
    world.buffer.fill_batch("held_out", state.handle, 0, [Prompt(f"question {i}") for i in range(prompts)], last=True)
    return state.handle


def test_groups_of_an_evaluation_are_gathered_and_never_claimed(world: World) -> None:
    world.start(math={}, held_out={"kind": "eval"})
    handle = open_evaluation(world)
    assert world.put(world.lease(2, "held_out")) == [PutOutcome.GATHERED] * 2
    assert world.buffer.batch_by_handle("held_out", handle).complete
    with pytest.raises(ValueError, match="never trained"):
        world.buffer.claim(world.held, 1, {"held_out": 2})
    assert world.buffer.train_tasks() == ["math"]
    world.check()


def test_xm01_an_evaluation_is_made_by_the_version_that_it_names_alone(world: World) -> None:
    world.start(math={}, held_out={"kind": "eval"}).complete(2)
    handle = open_evaluation(world, prompts=3)
    assert world.buffer.batch_by_handle("held_out", handle).version == 0
    old, mixed, _ = world.lease(3, "held_out")
    world.train(1)
    assert world.lease(3, "held_out", version=1) == (), "its weights are not those that the evaluation names"
    spans = make_sample(0).segments[0]
    newer = make_sample(1).segments[0]
    sample = make_sample(0)
    both = type(sample)(segments=(spans, newer), status=sample.status, finish_reason=sample.finish_reason, reward=1.0)
    assert world.buffer.put([GroupResult(mixed, (sample, both))]) == [PutOutcome.RESTARTED]
    assert world.put([old], version=0) == [PutOutcome.GATHERED]
    assert world.statuses("held_out") == {"pending": 1, "gathered": 1, "running": 1}
    (again,) = world.lease(3, "held_out", version=0)
    assert all(not sample.segments for sample in again.samples), "nothing of the other version is kept"
    world.check()


def test_an_interrupted_group_of_a_batch_goes_back_to_pending_with_what_it_has(world: World) -> None:
    world.start(math={"partial_rollout": True})
    state = world.buffer.open_batch("math", "1", "train", step=1)
    world.buffer.fill_batch("math", state.handle, 0, [Prompt("question")], last=True)
    assert world.put(world.lease(1), status="a") == [PutOutcome.RESTARTED]
    (lease,) = world.lease(1)
    np.testing.assert_array_equal(lease.samples[0].segments[0].response_ids, make_sample(0).segments[0].response_ids)
    assert world.put([lease]) == [PutOutcome.GATHERED]
    assert world.buffer.batch("math", "1") == world.buffer.batch_by_handle("math", state.handle)
    world.check()


def test_tc01_a_batch_that_stands_is_returned_for_the_same_content_and_refuses_another(world: World) -> None:
    world.start()
    state = world.buffer.open_batch("math", "7", "train", step=7, digest="a")
    assert world.buffer.open_batch("math", "7", "train", step=7, digest="a") == state
    with pytest.raises(ValueError, match="'7' is running with other content"):
        world.buffer.open_batch("math", "7", "train", step=7, digest="b")


def test_filling_a_batch_again_adds_nothing(world: World) -> None:
    world.start()
    handle = world.buffer.open_batch("math", "7", "train", step=7).handle
    for _ in range(2):
        assert world.buffer.fill_batch("math", handle, 0, [Prompt("a"), Prompt("b")], last=False) == 2
    assert world.buffer.fill_batch("math", handle, 2, [Prompt("c")], last=True) == 3
    assert world.buffer.fill_batch("math", handle, 3, [Prompt("d")], last=True) == 3
    assert world.statuses() == {"pending": 3}
    world.check()


def test_a_gathered_group_is_as_old_as_its_dead_weights_count(world: World) -> None:
    world.start(math={"max_staleness": 1})
    for step in (1, 2, 3):
        world.complete(2)
        world.train(step)
    handle = world.buffer.open_batch("math", "4", "train", step=4).handle
    world.buffer.fill_batch("math", handle, 0, [Prompt("question")], last=True)
    assert world.put(world.lease(1)) == [PutOutcome.GATHERED]
    world.begin(1, launch_id="after a crash")
    (group,) = world.buffer.begin_finalize("math", handle, "nonce", lease_s=10).groups
    assert group.oldest_version == 1
    world.train(2)
    world.train(3)
    world.buffer.end_finalize("math", handle, "nonce", b"{}", {group.group_id: PipelineOutput((1.0, 1.0), None)})
    assert world.statuses()["expired"] == 1, "version 1 is too old for step 4"
    world.check()


def test_batches_that_are_over_are_forgotten_when_many_more_are(world: World) -> None:
    world.start(math={}, held_out={"kind": "eval"})
    handles = []
    for version in range(203):
        handles.append(world.buffer.open_batch("held_out", f"{version}/held_out", "eval", step=0).handle)
        world.buffer.close_evaluation("held_out", handles[-1], orjson.dumps(version))
    assert [state and state.state for state in (world.buffer.batch("held_out", f"{n}/held_out") for n in (2, 3))] == [
        None,
        "finalized",
    ]
    assert world.buffer.close_evaluation("held_out", handles[3]) == b"3"
    keys = task_keys(world.buffer.run, "held_out")
    assert len(list(world.buffer.client.scan_iter(match=keys.batch("*")))) == 200


def test_an_id_that_is_used_again_outlives_its_former_batch(world: World) -> None:
    world.start()
    first = world.buffer.open_batch("math", "1", "train", step=1)
    world.buffer.abort_batch("math", first.handle, "")
    again = world.buffer.open_batch("math", "1", "train", step=1)
    for _ in range(200):
        world.buffer.abort_batch("math", world.buffer.open_batch("math", "2", "train", step=1).handle, "")
    assert world.buffer.running_batches("math") == [again] == [world.buffer.batch("math", "1")]
    with pytest.raises(BatchOver, match=first.handle):
        world.buffer.batch_by_handle("math", first.handle)


def test_a_group_that_leaves_its_batch_is_as_old_as_the_samples_that_it_still_has(world: World) -> None:
    world.start(math={"max_staleness": 1, "tail_batch_trigger_size": -1})
    handle = world.buffer.open_batch("math", "4", "train", step=4).handle
    world.buffer.fill_batch("math", handle, 0, [Prompt("question")], last=True)
    (lease,) = world.lease(1)
    for version in (1, 2, 3):
        world.buffer.publish(world.held, version, uri="u", digest=str(version))
    assert world.buffer.put([GroupResult(lease, (make_sample(0), make_sample(3)))]) == [PutOutcome.RESTARTED]
    world.buffer.begin_finalize("math", handle, "nonce", lease_s=10)
    world.buffer.end_finalize("math", handle, "nonce", b"{}", {})
    assert world.buffer.expire("math") == 0, "version 3 is young enough for step 4"
    assert [group.uid for group in world.buffer.query({"status": "aborted", "staleness": 0})] == [1]
    world.check()
