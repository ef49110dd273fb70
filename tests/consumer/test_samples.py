"""What a sample carries, from the worker that puts it to the batch that the trainer gets, through a real server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.errors import ArrayError
from rollq.buffer.values.rollouts import (
    ArrayRef,
    FinishReason,
    GroupResult,
    Sample,
    SampleStatus,
    Segment,
    VersionSpan,
)
from rollq.buffer.wire.arrays import store_array
from rollq.consumer import Batch, Consumer, ConsumerSettings
from support.buffer_run import World

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
ROUTED = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
TEACHER = np.array([-0.125, -0.25, -0.375], np.float16)
IMAGE = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

Train = Callable[[Sample, Sample], Batch]


@pytest.fixture
def train(buffer: Buffer, server_url: str) -> Train:
    """Put a group of two samples and take it as the trainer's batch."""

    def through(first: Sample, second: Sample) -> Batch:
        world = World(buffer).start(math={"batch_groups": 1, "max_staleness": 9})
        settings = ConsumerSettings.model_validate({"timeout_s": 5, "takeover": True})
        with Consumer.connect(server_url, run=buffer.run, weights={"w": torch.zeros(1)}, settings=settings) as consumer:
            assert world.admit(1) == 1
            leases = world.lease(1)
            assert world.buffer.put([GroupResult(leases[0], (first, second))]) == [PutOutcome.COMPLETED]
            return next(consumer)

    return through


def segment(prompt: list[int], response: list[int], *versions: VersionSpan, **changes: object) -> Segment:
    return Segment(
        np.array(prompt, np.int32),
        np.array(response, np.int32),
        np.linspace(-2, -1, len(response), dtype=np.float32),
        versions or (VersionSpan(2, 0, len(response)),),
        **changes,  # type: ignore[arg-type]
    )


def sample(*segments: Segment, reward: float = 0.0) -> Sample:
    return Sample(segments, SampleStatus.COMPLETED, finish_reason=FinishReason.STOP, reward=reward)


def test_xd01_a_sample_reaches_the_trainer_with_all_that_was_put(train: Train) -> None:
    first_turn = segment([1, 2], [3, 4, 5], VersionSpan(1, 0, 1), VersionSpan(2, 0, 2))
    second_turn = segment([1, 2, 3, 4, 5, 6], [7, 8], loss_mask=np.array([True, False]))
    whole = Sample(
        (first_turn, second_turn),
        SampleStatus.COMPLETED,
        finish_reason=FinishReason.TOOL_CALLS,
        reward=1.5,
        reward_parts={"right": 1.0, "format": 0.5},
        text="3 4",
        error="the first call of the tool failed",
        sampling={"temperature": 0.5, "top_p": 0.9, "stop": ["\n"], "seed": 5},
        extra={"turns": 2, "environment": {"name": "shop"}},
        session_id="session-7",
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "add"}},
    )
    batch = train(whole, sample(segment([1], [9])))
    got = batch.samples[0]
    assert got.finish_reason is FinishReason.TOOL_CALLS
    for name in (
        "status", "finish_reason", "reward", "reward_parts", "text", "error", "sampling", "extra", "session_id",
        "tools", "tool_choice",
    ):  # fmt: skip
        assert getattr(got, name) == getattr(whole, name), name
    assert (batch.samples[1].session_id, batch.samples[1].tools, batch.samples[1].tool_choice) == (None, (), None)

    one, two = (sequence for sequence in batch.sequences if sequence.sample == 0)
    assert one.ids.tolist() == [1, 2, 3, 4, 5]
    assert one.loss_mask.tolist() == [False, False, True, True, True]
    assert one.versions.tolist() == [-1, -1, 0, 0, 0]
    assert one.epochs.tolist() == [-1, -1, 1, 2, 2]
    assert one.logprobs.tolist() == [0, 0, -2, -1.5, -1]
    assert two.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert two.loss_mask.tolist() == [False] * 6 + [True, False]
    assert (one.sample_loss_tokens, two.sample_loss_tokens) == (4, 4)


def test_xd01_advantages_are_counted_per_sample_and_not_per_segment(train: Train) -> None:
    turns = sample(segment([1], [2]), segment([1, 2], [3]), segment([1, 2, 3], [4]), reward=1.0)
    batch = train(turns, sample(segment([1], [9])))
    assert batch.rewards.tolist() == [1.0, 0.0]
    np.testing.assert_allclose(batch.advantages, [1, -1], rtol=1e-4)  # a mean over segments would be 0.75
    micro = batch.to_torch()
    expected = {0: float(batch.advantages[0]), 1: float(batch.advantages[1])}
    for row, index in enumerate(micro.sequences):
        assert float(micro.advantages[row, 0]) == pytest.approx(expected[batch.sequences[index].sample])


def test_xd02_named_arrays_reach_the_batch_and_its_micro_batches(train: Train) -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "routed_experts": ROUTED,
        "teacher_logprobs": TEACHER,
        "pixel_values": IMAGE,
    }
    bare = {"routed_experts": ROUTED[:1], "teacher_logprobs": TEACHER[:1]}
    batch = train(sample(segment([1, 2], [3, 4, 5], arrays=arrays)), sample(segment([1], [9], arrays=bare)))
    got = batch.sequences[0].arrays
    assert got.keys() == arrays.keys()
    for name, array in arrays.items():
        found = got[name]
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)
    [micro] = batch.micro_batches(100, padded=True, arrays=["routed_experts", "teacher_logprobs"])
    row = micro.sequences.index(0)
    assert micro.arrays["routed_experts"].dtype == torch.uint8
    assert micro.arrays["teacher_logprobs"].dtype == torch.float16
    assert micro.arrays["routed_experts"][row, 2:].tolist() == ROUTED.tolist()
    assert micro.arrays["teacher_logprobs"][row].tolist() == [0, 0, *TEACHER.tolist()]


def test_xd02_a_large_array_travels_as_a_reference_and_is_loaded_when_asked_for(train: Train, tmp_path: Path) -> None:
    references = [store_array(tmp_path / "arrays", array) for array in (ROUTED, ROUTED[:1])]
    batch = train(
        sample(segment([1, 2], [3, 4, 5], arrays={"routed": references[0]})),
        sample(segment([1], [9], arrays={"routed": references[1]})),
    )
    assert [sequence.arrays["routed"] for sequence in batch.sequences] == references
    [micro] = batch.micro_batches(100, padded=True, arrays=["routed"])
    assert micro.arrays["routed"][micro.sequences.index(0), 2:].tolist() == ROUTED.tolist()
    assert isinstance(references[0], ArrayRef)
    Path(references[0].uri.removeprefix("file://")).unlink()
    assert batch.micro_batches(100)[0].arrays == {}
    with pytest.raises(ArrayError, match="No such file"):
        batch.micro_batches(100, arrays=["routed"])


def test_xd02_arrays_go_with_the_stale_sample_that_is_reset(buffer: Buffer) -> None:
    world = World(buffer).start(math={"batch_groups": 1, "max_staleness": 1})
    assert world.admit(1) == 1
    old = sample(segment([1], [2, 3, 4], VersionSpan(1, 0, 3), arrays={"routed": ROUTED}))
    new = sample(segment([1], [2, 3, 4], VersionSpan(1, 1, 3), arrays={"routed": ROUTED}))
    for version in (1, 2):
        buffer.publish(world.held, version, uri="", digest=f"d{version}")
    [lease] = world.lease(1)
    buffer.put([GroupResult(lease, (old, new))])
    assert world.statuses() == {"expired": 1}
    assert buffer.recycle("math", epoch=1, target=1000, limit=1) == 1
    [lease] = world.lease(1)
    assert [one.status for one in lease.samples] == [SampleStatus.PENDING, SampleStatus.COMPLETED]
    assert lease.samples[0].segments == ()
    np.testing.assert_array_equal(lease.samples[1].segments[0].arrays["routed"], ROUTED)
