"""Tokens of samples that are still being made, kept in case their worker dies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.leases import PutOutcome, SalvageOutcome
from rollq.buffer.errors import CorruptFrame
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import (
    EMPTY_SAMPLE,
    MOST_PART_BYTES,
    MOST_PARTS,
    FinishReason,
    GroupResult,
    Lease,
    Sample,
    SamplePart,
    SampleStatus,
    Segment,
    VersionSpan,
)
from rollq.buffer.wire.parts import decode_parts, encode_part, join_parts, rest_of
from support.any_server import AnyServer
from support.buffer_run import World, make_sample
from support.parts import cut, in_parts, part

KEPT, FULL, REFUSED = SalvageOutcome.KEPT, SalvageOutcome.FULL, SalvageOutcome.REFUSED


def a_sample(tokens: int, *, versions: tuple[VersionSpan, ...] = (), status: str = "a") -> Sample:
    """A sample whose token i has id i and logprob -i / 1000."""
    segment = Segment(
        prompt_ids=np.array([7, 8, 9], np.int32),
        response_ids=np.arange(tokens, dtype=np.int32),
        logprobs=(-np.arange(tokens) / 1000).astype(np.float32),
        versions=versions or (VersionSpan(1, 0, tokens),),
    )
    finish = FinishReason.STOP if status == "c" else FinishReason.ABORT
    return Sample((segment,), SampleStatus(status), finish, 1.0 if status == "c" else None)


def same(found: Sample, wanted: Sample) -> None:
    for one, other in zip(found.segments, wanted.segments, strict=True):
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()
        assert one.versions == other.versions
        assert (one.loss_mask is None) == (other.loss_mask is None)
        if one.loss_mask is not None and other.loss_mask is not None:
            assert one.loss_mask.tolist() == other.loss_mask.tolist()


def die(world: World, lease: Lease) -> Lease:
    """The worker of a lease dies; returns the next lease of its group."""
    world.run_out([lease])
    assert world.buffer.reap("math").requeued == 1
    world.check()
    (again,) = world.lease(1)
    assert again.group_id == lease.group_id
    return again


@pytest.fixture
def salvaging(world: World) -> World:
    world.start(math={"partial_rollout": True, "max_staleness": 2, "stragglers": "expire"}).admit(1)
    return world


def test_the_next_attempt_has_the_tokens_that_were_salvaged(salvaging: World) -> None:
    (lease,) = salvaging.lease(1)
    long, short = a_sample(300), a_sample(200, status="c")
    assert salvaging.buffer.salvage(list(in_parts(lease, long, 100, 250))) == [KEPT, KEPT]
    salvaging.check()
    assert salvaging.buffer.salvage([part(lease, 2, short, index=1)]) == [KEPT]
    again = die(salvaging, lease)
    same(again.samples[0], a_sample(250))
    same(again.samples[1], short)
    assert [sample.status for sample in again.samples] == [SampleStatus.ABORTED, SampleStatus.COMPLETED]
    assert (again.suspect, again.tries, again.parts, again.samples[1].reward) == (True, 1, 3, 1.0)

    assert salvaging.buffer.salvage([part(again, 3, a_sample(280), 250)]) == [KEPT]
    third = die(salvaging, again)
    same(third.samples[0], a_sample(280))
    done = (a_sample(300, status="c"), third.samples[1])
    assert salvaging.buffer.put([GroupResult(third, done)]) == [PutOutcome.COMPLETED]
    salvaging.check()
    assert salvaging.buffer.counts("math").progress["tokens"] == 500
    salvaging.admit(1)
    salvaging.complete(1)
    claimed = salvaging.claim(1, math=2)
    same(salvaging.buffer.fetch(claimed.groups)[0].samples[1], short)


def test_salvage_of_a_lease_that_is_over_is_refused(salvaging: World) -> None:
    (lease,) = salvaging.lease(1)
    again = die(salvaging, lease)
    assert salvaging.buffer.salvage([part(lease, 0, a_sample(10))]) == [REFUSED]
    assert salvaging.buffer.salvage([part(again, 0, a_sample(20))]) == [KEPT]
    salvaging.put([again], tokens=30)
    assert salvaging.buffer.salvage([part(again, 1, a_sample(40), 20)]) == [REFUSED]
    salvaging.check()


def test_parts_count_once_and_in_order(salvaging: World) -> None:
    (lease,) = salvaging.lease(1)
    first, second = in_parts(lease, a_sample(60), 20, 60)
    assert salvaging.buffer.salvage([second]) == [REFUSED], "the first has not arrived"
    for each in (first, first, second, first, second):
        assert salvaging.buffer.salvage([each]) == [KEPT]
    same(die(salvaging, lease).samples[0], a_sample(60))


def test_a_sample_that_was_interrupted_before_continues_in_parts(salvaging: World) -> None:
    (lease,) = salvaging.lease(1)
    salvaging.buffer.put([GroupResult(lease, (a_sample(50), EMPTY_SAMPLE))])
    salvaging.buffer.recycle("math", epoch=1, target=9, limit=9)
    (again,) = salvaging.lease(1)
    spans = (VersionSpan(1, 0, 50), VersionSpan(1, 1, 40))
    whole = a_sample(90, versions=spans)
    assert salvaging.buffer.salvage([part(again, 0, whole, 50)]) == [KEPT]
    third = die(salvaging, again)
    same(third.samples[0], whole)
    # an attempt that makes nothing leaves the sample as it was
    made = (third.samples[0], a_sample(5))
    assert salvaging.buffer.put([GroupResult(third, made)]) == [PutOutcome.ABORTED]
    salvaging.check()
    salvaging.buffer.recycle("math", epoch=1, target=9, limit=9)
    (fourth,) = salvaging.lease(1)
    same(fourth.samples[0], whole)
    assert fourth.parts == 0
    assert salvaging.buffer.counts("math").progress["tokens"] == 95


def test_a_group_handed_back_keeps_what_was_salvaged(salvaging: World) -> None:
    (lease,) = salvaging.lease(1)
    salvaging.buffer.salvage([part(lease, 0, a_sample(128))])
    salvaging.buffer.hand_back([lease], counted=True, error="the engine died")
    salvaging.check()
    (again,) = salvaging.lease(1)
    same(again.samples[0], a_sample(128))


def test_salvage_that_is_too_old_when_its_worker_dies_is_dropped(salvaging: World) -> None:
    (lease,) = salvaging.lease(1)
    fresh = a_sample(60, versions=(VersionSpan(1, 3, 60),))
    salvaging.buffer.salvage([part(lease, 0, a_sample(128)), part(lease, 1, fresh, index=1)])
    for version in (1, 2, 3):
        salvaging.complete(2, version=version - 1)
        salvaging.train(version)
    again = die(salvaging, lease)
    assert again.samples[0] is EMPTY_SAMPLE
    same(again.samples[1], fresh)
    anew = a_sample(30, versions=(VersionSpan(1, 3, 30),))
    assert salvaging.buffer.salvage([part(again, 2, anew)]) == [KEPT]
    same(die(salvaging, again).samples[0], anew)


def test_salvage_that_is_too_old_when_its_group_is_handed_back_is_dropped(salvaging: World) -> None:
    (lease,) = salvaging.lease(1)
    salvaging.buffer.salvage([part(lease, 0, a_sample(128))])
    for version in (1, 2, 3):
        salvaging.complete(2, version=version - 1)
        salvaging.train(version)
    salvaging.buffer.hand_back([lease])
    salvaging.check()
    assert keys_of_parts(salvaging, lease) == (False, set())


def keys_of_parts(world: World, lease: Lease) -> tuple[bool, set[str]]:
    """Whether a group has a payload, and the fields that count its parts."""
    rollout = task_keys(world.buffer.run, "math").rollout(lease.group_id)
    return bool(world.buffer.client.exists(rollout)), world.buffer.inspect("math", lease.group_id).keys() & {
        "parts",
        "part_bytes",
    }


def test_a_group_that_fails_or_is_dropped_leaves_no_part(salvaging: World) -> None:
    (lease,) = salvaging.lease(1)
    salvaging.buffer.salvage([part(lease, 0, a_sample(128))])
    failed = Sample((), SampleStatus.FAILED, failure=FailureKind.GRADER, error="no")
    assert salvaging.buffer.put([GroupResult(lease, (failed, failed))]) == [PutOutcome.FAILED]
    salvaging.check()
    assert keys_of_parts(salvaging, lease)[1] == set()


def test_a_group_that_runs_out_of_tries_leaves_no_part(world: World) -> None:
    world.start(math={"partial_rollout": True, "max_tries": 1}).admit(1)
    (lease,) = world.lease(1)
    world.buffer.salvage([part(lease, 0, a_sample(128))])
    world.buffer.hand_back([lease], counted=True, error="the engine died")
    assert world.statuses() == {"failed": 1}
    world.check()
    assert keys_of_parts(world, lease) == (False, set())


def test_a_group_that_is_quarantined_leaves_no_part(salvaging: World) -> None:
    (lease,) = salvaging.lease(1)
    salvaging.buffer.salvage([part(lease, 0, a_sample(128))])
    again = die(salvaging, die(salvaging, lease))
    assert again.alone
    salvaging.run_out([again])
    assert salvaging.buffer.reap("math").quarantined == 1
    facts = salvaging.buffer.inspect("math", 1)
    assert set(facts["letters"]) == {SampleStatus.PENDING.value}, "nothing is left of its samples"
    assert set(facts["versions"].split(",")) == {"-"}
    salvaging.check()
    assert keys_of_parts(salvaging, lease) == (False, set())


def test_a_group_whose_salvaged_samples_expire_leaves_no_payload(world: World) -> None:
    world.start(
        math={"partial_rollout": True, "max_staleness": 0, "stragglers": "expire", "tail_batch_trigger_size": -1}
    ).admit(1)
    (lease,) = world.lease(1)
    world.buffer.salvage([part(lease, 0, a_sample(128))])
    again = die(world, lease)
    world.complete(2)
    world.train(1)
    same(again.samples[0], a_sample(128))
    assert world.buffer.put([GroupResult(again, (again.samples[0], EMPTY_SAMPLE))]) == [PutOutcome.DROPPED]
    world.check()
    assert keys_of_parts(world, lease) == (False, set())


def test_a_part_that_cannot_be_encoded_is_refused_alone(salvaging: World) -> None:
    salvaging.admit(1)
    first, second = salvaging.lease(2)
    bad = replace(a_sample(50), extra={"messages": {1, 2}})
    parts = [part(first, 0, bad), part(first, 1, a_sample(60), 50), part(second, 0, a_sample(50))]
    assert salvaging.buffer.salvage(parts) == [REFUSED, REFUSED, KEPT]


def test_parts_beyond_the_limits_are_not_kept(salvaging: World) -> None:
    (lease,) = salvaging.lease(1)
    group = task_keys(salvaging.buffer.run, "math").group(lease.group_id)
    first, second, third = in_parts(lease, a_sample(60), 20, 40, 60)
    assert salvaging.buffer.salvage([first]) == [KEPT]
    small = int(salvaging.buffer.inspect("math", lease.group_id)["part_bytes"])
    assert 0 < small < 1000
    salvaging.buffer.client.hset(group, "part_bytes", MOST_PART_BYTES - small // 2)
    assert salvaging.buffer.salvage([second, third]) == [FULL, REFUSED]
    same(die(salvaging, lease).samples[0], a_sample(20))


def test_as_many_parts_as_allowed_are_replaced_by_the_result(salvaging: World) -> None:
    (lease,) = salvaging.lease(1)
    each = a_sample(1)
    for start in range(0, MOST_PARTS, 1024):
        few = [SamplePart(lease, number, 0, 0, each) for number in range(start, start + 1024)]
        assert set(salvaging.buffer.salvage(few)) == {KEPT}
    assert salvaging.buffer.salvage([SamplePart(lease, MOST_PARTS, 0, 0, each)]) == [FULL]
    salvaging.check()
    again = die(salvaging, lease)
    same(again.samples[0], each)
    salvaging.put([again], tokens=30)
    salvaging.check()
    assert keys_of_parts(salvaging, lease) == (True, set())


@pytest.mark.parametrize("left", [0, 5, 20])
def test_a_part_that_is_cut_short_does_not_spoil_the_lease(salvaging: World, left: int) -> None:
    (lease,) = salvaging.lease(1)
    salvaging.buffer.salvage([*in_parts(lease, a_sample(60), 20, 60)])
    rollout = task_keys(salvaging.buffer.run, "math").rollout(lease.group_id)
    stored = salvaging.buffer.client.hget(rollout, "2")
    assert stored is not None
    salvaging.buffer.client.hset(rollout, "2", stored[:left])
    again = die(salvaging, lease)
    assert again.samples[0] is EMPTY_SAMPLE
    assert salvaging.buffer.salvage([part(again, 2, a_sample(30))]) == [KEPT]
    same(die(salvaging, again).samples[0], a_sample(30))


def test_a_finished_sample_replaces_its_parts(salvaging: World) -> None:
    """Its loss mask and its arrays may have changed since they were kept."""
    (lease,) = salvaging.lease(1)
    finished = a_sample(60, status="c")
    mask = np.zeros(60, np.bool_)
    finished = replace(finished, segments=(replace(finished.segments[0], loss_mask=mask, arrays={"kl": mask * 1.5}),))
    salvaging.buffer.salvage([part(lease, 0, a_sample(40)), part(lease, 1, finished, 0)])
    (segment,) = die(salvaging, lease).samples[0].segments
    assert segment.loss_mask is not None
    assert (len(segment.loss_mask), int(segment.loss_mask.sum())) == (60, 0)
    assert segment.arrays.keys() == {"kl"}


def test_tokens_that_are_kept_again_count_once(salvaging: World) -> None:
    (lease,) = salvaging.lease(1)
    whole = SamplePart(lease, 2, 0, 0, a_sample(300, status="c"), tokens_again=256)
    salvaging.buffer.salvage([*in_parts(lease, a_sample(256), 128, 256), whole])
    again = die(salvaging, lease)
    salvaging.buffer.put([GroupResult(again, (again.samples[0], a_sample(100, status="c")))])
    assert salvaging.buffer.counts("math").progress["tokens"] == 400


def test_a_snapshot_holds_what_was_salvaged(salvaging: World, any_server: AnyServer, tmp_path: Path) -> None:
    (lease,) = salvaging.lease(1)
    salvaging.buffer.salvage(list(in_parts(lease, a_sample(128), 100, 128)))
    salvaging.buffer.save(tmp_path / "saved")
    with Buffer.connect(any_server.url, salvaging.buffer.run + "-restored") as buffer:
        buffer.restore(tmp_path / "saved")
        restored = World(buffer)
        restored.begin(0, launch_id="another")
        restored.check()
        (again,) = restored.lease(1)
        same(again.samples[0], a_sample(128))
        restored.put([again], tokens=130)
        restored.check()


def test_a_snapshot_holds_groups_of_many_parts(salvaging: World, any_server: AnyServer, tmp_path: Path) -> None:
    (lease,) = salvaging.lease(1)
    one = a_sample(1)
    assert set(salvaging.buffer.salvage([SamplePart(lease, number, 0, 0, one) for number in range(4200)])) == {KEPT}
    salvaging.buffer.save(tmp_path / "saved")
    with Buffer.connect(any_server.url, salvaging.buffer.run + "-restored") as buffer:
        buffer.restore(tmp_path / "saved")
        restored = World(buffer)
        restored.begin(0, launch_id="another")
        restored.check()
        (again,) = restored.lease(1)
        assert again.parts == 4200
        same(again.samples[0], one)


def test_a_part_that_cannot_be_read_costs_its_sample_alone(salvaging: World) -> None:
    (lease,) = salvaging.lease(1)
    salvaging.buffer.salvage([part(lease, 0, a_sample(128)), part(lease, 1, a_sample(64), index=1)])
    rollout = task_keys(salvaging.buffer.run, "math").rollout(lease.group_id)
    stored = salvaging.buffer.client.hget(rollout, "2")
    assert stored is not None
    salvaging.buffer.client.hset(rollout, "2", stored[:-1])
    again = die(salvaging, lease)
    assert again.samples[0] is EMPTY_SAMPLE
    same(again.samples[1], a_sample(64))


def test_samples_in_parts_are_the_samples_whole() -> None:
    """Also with several segments, masks and arrays per token."""
    lease = Lease("math", 1, 1, "n", 1, None, (EMPTY_SAMPLE,), 1)  # type: ignore[arg-type]
    first, second = (make_sample(version, tokens=tokens).segments[0] for version, tokens in ((1, 40), (2, 30)))
    mask = np.arange(30) % 3 > 0
    second = replace(second, loss_mask=mask, arrays={"routes": np.arange(60).reshape(30, 2), "score": np.zeros(1)})
    whole = Sample((first, second), SampleStatus.ABORTED, FinishReason.ABORT)
    for ends in ((70,), (40, 70), (10, 40, 41, 70), (39, 41, 60, 70)):
        parts, before = [], 0
        for end in ends:
            parts.append(rest_of(made_by(whole, end), before))
            before = end
        joined = join_parts(parts)
        same(joined, whole)
        routes: Any = joined.segments[1].arrays["routes"]
        assert np.array_equal(routes, np.arange(60).reshape(30, 2))
        assert joined.segments[1].arrays.keys() == {"routes", "score"}
        stored, before = {}, 0
        for number, (each, end) in enumerate(zip(parts, ends, strict=True)):
            stored[1 + number] = encode_part(SamplePart(lease, number, 0, before, each))
            before = end
        found = decode_parts(0, stored, group_size=1)
        assert found is not None
        same(found, whole)
        if len(ends) > 1:
            del stored[1]
            with pytest.raises(CorruptFrame, match="tokens, but 0 are stored before it"):
                decode_parts(0, stored, group_size=1)


def made_by(whole: Sample, tokens: int) -> Sample:
    """The sample when it had its first `tokens` response tokens."""
    segments, left = [], tokens
    for segment in whole.segments:
        count = min(left, len(segment.response_ids))
        left -= count
        if count:
            arrays = {name: array[:count] if len(array) > 1 else array for name, array in segment.arrays.items()}  # type: ignore[index, arg-type]
            mask = None if segment.loss_mask is None else segment.loss_mask[:count]
            segments.append(replace(cut(segment, count), loss_mask=mask, arrays=arrays))
    return replace(whole, segments=tuple(segments))
