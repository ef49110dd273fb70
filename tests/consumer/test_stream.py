"""Batches that are trained while they fill: the same groups, the same gradients, and nothing lost on the way."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.errors import ClaimTimeout, ConfigError, CorruptGroup, FencedError, NotClaimed
from rollq.buffer.store.keys import task_keys
from rollq.consumer import (
    AdvantageSettings,
    Batch,
    Consumer,
    ConsumerSettings,
    LossSettings,
    MicroBatch,
    OtherLogprobs,
    policy_loss,
)
from rollq.consumer.batches.sequences import BatchCounts
from rollq.consumer.claims.stream import BatchStream, expected_counts, gradient_scale
from rollq.consumer.losses.presets import PRESETS
from support.manual_worker import StepwiseWorker, make_run
from support.tiny_qwen3 import flat_gradient, tiny_qwen3
from support.waiting import PATIENCE_S, wait_until

Connect = Callable[..., Consumer]
GROUPS = 6
MAX_TOKENS = 18
"""No more than a group has, so that each makes a part: three samples of five tokens and a prompt."""


@pytest.fixture
def worker(buffer: Buffer, tmp_path: Path) -> StepwiseWorker:
    make_run(buffer, batch_groups=GROUPS, max_staleness=0, min_valid_samples=3)
    return StepwiseWorker(buffer, tiny_qwen3(1), tmp_path / "worker")


@pytest.fixture
def connect(server_url: str, run_name: str, model_folder: Path) -> Connect:
    def open_consumer(resume_from: int = 0, stop: threading.Event | None = None, **settings: object) -> Consumer:
        return Consumer.connect(
            server_url,
            run=run_name,
            weights=model_folder,
            resume_from=resume_from,
            settings=ConsumerSettings.model_validate({"timeout_s": 0.2, **settings}),
            stop=stop,
        )

    return open_consumer


def ids(batch: Batch) -> list[int]:
    """The groups that are trained."""
    return [batch.group_ids[index][1] for index in batch.part]


def batch_of(stream: BatchStream) -> Batch | None:
    return stream.batch


def statuses(buffer: Buffer) -> dict[str, int]:
    return {status.value: number for status, number in buffer.counts("math").statuses.items() if number}


def test_groups_come_in_the_order_in_which_they_are_finished(
    connect: Connect, worker: StepwiseWorker, buffer: Buffer
) -> None:
    with connect() as consumer:
        leases = worker.begin(GROUPS)
        stream = consumer.stream(MAX_TOKENS)
        parts = stream.parts()
        for number in (3, 0, 5):
            worker.finish([leases[number]])
            part = next(parts)
            assert ids(part) == [leases[number].group_id]
            assert stream.part is part
        assert batch_of(stream) is None
        assert statuses(buffer) == {"running": 3, "claimed": 3}
        worker.finish([leases[4], leases[1], leases[2]])
        assert sorted(ids(next(parts))) == [leases[number].group_id for number in (1, 2, 4)]
        assert batch_of(stream) is None, "its last part may still be trained"
        assert next(parts, None) is None
        assert stream.batch is not None
        assert ids(stream.batch)[:3] == [leases[number].group_id for number in (3, 0, 5)]
        consumer.publish(tiny_qwen3(2).state_dict(), step=1)
        consumer.commit(stream.batch)
        assert statuses(buffer) == {"archived": GROUPS}
        assert consumer.step == 2


def test_micro_batches_are_those_of_the_parts_with_the_indices_of_the_whole_batch(
    connect: Connect, worker: StepwiseWorker
) -> None:
    with connect() as consumer:
        leases = worker.begin(GROUPS)
        worker.finish(leases[:2])
        stream = consumer.stream(MAX_TOKENS)
        found = [next(stream)]
        worker.finish(leases[2:])
        found += list(stream)
        assert stream.batch is not None
        whole = stream.batch
        assert sorted(index for micro in found for index in micro.sequences) == list(range(len(whole.sequences)))
        for micro in found:
            for index in micro.sequences:
                chosen = micro.sequence_index == index
                np.testing.assert_array_equal(micro.input_ids[chosen].numpy(), whole.sequences[index].ids)
                sample = whole.sequences[index].sample
                assert set(micro.advantages[chosen].tolist()) == {float(whole.advantages[sample])}
        assert whole.share == tuple(range(len(whole.sequences)))
        assert whole.counts.groups == GROUPS


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_gradient_is_that_of_the_whole_batch(connect: Connect, worker: StepwiseWorker, aggregation: str) -> None:
    """With every loss, in micro-batches that are divided in another way."""
    losses = [
        LossSettings.model_validate({"preset": preset, "aggregation": aggregation, "kl_coefficient": 0.1})
        for preset in sorted(PRESETS)
    ]
    with connect() as consumer:
        leases = worker.begin(GROUPS)
        worker.finish(leases[3:])
        stream = consumer.stream(MAX_TOKENS, loss=losses[0])
        found = [next(stream)]
        worker.finish(leases[:3])
        found += list(stream)
        assert stream.batch is not None
        whole = stream.batch.micro_batches(MAX_TOKENS * 3)
        assert len(whole) < len(found)
    for loss in losses:
        streamed, expected = tiny_qwen3(3).double(), tiny_qwen3(3).double()
        for micro in found:
            gradient_of(streamed, micro, loss)
        assert stream.finish(streamed.parameters()) == stream.gradient_scale
        for micro in whole:
            gradient_of(expected, micro, loss)
        largest = flat_gradient(expected).abs().max()
        assert largest > 0, loss.preset
        assert (flat_gradient(streamed) - flat_gradient(expected)).abs().max() <= 1e-6 * largest, loss.preset


def gradient_of(model: torch.nn.Module, micro: MicroBatch, loss: LossSettings) -> None:
    reference = torch.full((int(micro.loss_mask.sum()),), -3.0)
    policy_loss(model, micro, loss, others=OtherLogprobs(reference=reference)).backward()  # type: ignore[no-untyped-call]


def test_leaving_the_loop_keeps_the_groups_for_whoever_asks_again(
    connect: Connect, worker: StepwiseWorker, buffer: Buffer
) -> None:
    with connect() as consumer:
        leases = worker.begin(GROUPS)
        worker.finish([leases[4]])
        for _ in consumer.stream(MAX_TOKENS):
            break
        with pytest.raises(ClaimTimeout, match="1 of 6 ready"):
            next(consumer)
        assert statuses(buffer) == {"running": 5, "claimed": 1}
        worker.finish([leases[0]])
        parts = consumer.stream(MAX_TOKENS).parts()
        assert [ids(next(parts)), ids(next(parts))] == [[leases[4].group_id], [leases[0].group_id]]
        worker.finish([lease for lease in leases if lease not in (leases[0], leases[4])])
        batch = next(consumer)
        assert ids(batch)[:2] == [leases[4].group_id, leases[0].group_id]
        assert len(batch.groups) == GROUPS
        consumer.commit(batch)


def test_a_batch_that_still_fills_is_not_committed(connect: Connect, worker: StepwiseWorker, buffer: Buffer) -> None:
    with connect() as consumer:
        leases = worker.begin(GROUPS)
        worker.finish(leases[:1])
        stream = consumer.stream(MAX_TOKENS)
        next(stream)
        assert stream.part is not None
        with pytest.raises(NotClaimed, match="still fills"):
            buffer.commit(consumer._lease.epoch, 1)
        with pytest.raises(ConfigError, match="not whole"):
            stream.finish([])
        with pytest.raises(ConfigError, match="the last batch was"):
            consumer.publish(tiny_qwen3(2).state_dict(), step=1)
        consumer.release(stream.part, "return")
        assert statuses(buffer) == {"running": 5, "completed": 1}
        with pytest.raises(NotClaimed, match="released"):
            list(stream)


def test_a_trainer_that_takes_over_gets_the_same_parts_and_goes_on_from_there(
    connect: Connect, worker: StepwiseWorker
) -> None:
    with connect() as consumer:
        leases = worker.begin(GROUPS)
        parts = consumer.stream(MAX_TOKENS).parts()
        before = []
        for number in (5, 1, 3):
            worker.finish([leases[number]])
            before.append(next(parts))
    worker.finish([leases[0]])
    with connect() as consumer:
        stream = consumer.stream(MAX_TOKENS)
        parts = stream.parts()
        after = [next(parts) for _ in range(4)]
        assert [ids(part) for part in after] == [[leases[number].group_id] for number in (5, 1, 3, 0)]
        for old, new in zip(before, after, strict=False):
            assert [micro.input_ids.tolist() for micro in old.micro_batches(MAX_TOKENS)] == [
                micro.input_ids.tolist() for micro in new.micro_batches(MAX_TOKENS)
            ]
            assert old.expected_counts == new.expected_counts
        worker.finish([leases[2], leases[4]])
        assert len(list(parts)) == 1
        assert stream.batch is not None


def test_every_rank_gets_the_same_parts_whenever_it_asks(connect: Connect, worker: StepwiseWorker) -> None:
    ranks = [connect(rank=rank, world_size=2, launch_id="launch", timeout_s=PATIENCE_S) for rank in (0, 1)]
    with ranks[0], ranks[1]:
        leases = worker.begin(GROUPS)
        worker.finish(leases[:2])
        first, last = (consumer.stream(MAX_TOKENS // 2).parts() for consumer in ranks)
        taken = [[next(first)], []]
        worker.finish(leases[2:5])
        taken[0].append(next(first))
        taken[1] += [next(last), next(last)]
        worker.finish(leases[5:])
        with ThreadPoolExecutor() as pool:
            rest = list(pool.map(lambda parts: list(parts), (first, last)))
        taken = [mine + more for mine, more in zip(taken, rest, strict=True)]
        assert [ids(part) for part in taken[0]] == [ids(part) for part in taken[1]]
        for mine, theirs in zip(*taken, strict=True):
            micro_batches = [part.micro_batches(MAX_TOKENS // 2) for part in (mine, theirs)]
            assert len(micro_batches[0]) == len(micro_batches[1])
            trained = [index for part in micro_batches for micro in part for index in micro.sequences]
            assert sorted(trained) == [
                index for index, group in enumerate(mine.sequence_groups.tolist()) if group in mine.part
            ]


def test_a_stream_takes_no_group_that_the_whole_batch_might_not_have(
    connect: Connect, worker: StepwiseWorker, buffer: Buffer
) -> None:
    """With more groups under way than the batch has, the first in line are the batch, not the first to finish."""
    with connect() as consumer:
        leases = worker.begin(GROUPS + 2)
        worker.finish(leases[6:])
        with pytest.raises(ClaimTimeout):
            next(consumer.stream(MAX_TOKENS))
        assert statuses(buffer) == {"running": 6, "completed": 2}, "six earlier ones may still come before them"
        worker.finish(leases[:5])
        stream = consumer.stream(MAX_TOKENS)
        assert ids(next(stream.parts())) == [lease.group_id for lease in leases[:5]]
        worker.finish(leases[5:6])
        assert list(stream)
        assert stream.batch is not None
        assert ids(stream.batch) == [lease.group_id for lease in leases[:6]]


def test_a_stop_ends_the_iteration_without_a_batch(connect: Connect, worker: StepwiseWorker) -> None:
    stop = threading.Event()
    with connect(stop=stop, timeout_s=None) as consumer:
        leases = worker.begin(GROUPS)
        worker.finish(leases[:1])
        stream = consumer.stream(MAX_TOKENS)
        for _ in stream:
            stop.set()
        assert stream.batch is None


def test_the_end_of_production_ends_the_iteration_without_a_batch(
    connect: Connect, worker: StepwiseWorker, buffer: Buffer
) -> None:
    with connect(timeout_s=PATIENCE_S) as consumer:
        worker.finish(worker.begin(2))
        buffer.set_control("math", Control.DONE, "the hook has ended it")
        stream = consumer.stream(MAX_TOKENS)
        assert len(list(stream.parts())) == 1
        assert stream.batch is None
        assert statuses(buffer) == {"claimed": 2}


def test_groups_are_read_ahead_for_a_stream_too(connect: Connect, worker: StepwiseWorker, buffer: Buffer) -> None:
    with connect(timeout_s=PATIENCE_S) as consumer:
        worker.finish(worker.begin(GROUPS))
        first = consumer.stream(MAX_TOKENS)
        assert list(first)
        assert first.batch is not None
        consumer.publish(tiny_qwen3(2).state_dict(), step=1)
        consumer.commit(first.batch)
        worker.finish(worker.begin(GROUPS))
        consumer._prefetch.begin(2)
        wait_until(lambda: len(consumer._prefetch._kept) == GROUPS)
        second = consumer.stream(MAX_TOKENS)
        assert list(second)
        assert second.batch is not None
        assert second.batch.prefetched == 1.0


def test_a_size_that_changes_is_not_that_of_a_batch_that_fills(
    connect: Connect, worker: StepwiseWorker, buffer: Buffer
) -> None:
    with connect(timeout_s=PATIENCE_S) as consumer:
        leases = worker.begin(GROUPS)
        worker.finish(leases[:2])
        stream = consumer.stream(MAX_TOKENS)
        parts = stream.parts()
        next(parts)
        buffer.change_rules("math", {"batch_groups": GROUPS + 1})
        worker.finish(leases[2:])
        list(parts)
        assert stream.batch is not None
        assert len(stream.batch.groups) == GROUPS


def test_an_unreadable_group_ends_the_stream_and_the_step_gets_another_batch(
    connect: Connect, worker: StepwiseWorker, buffer: Buffer
) -> None:
    with connect() as consumer:
        leases = worker.begin(GROUPS)
        stream = consumer.stream(MAX_TOKENS)
        worker.finish(leases[:1])
        next(stream)
        worker.finish(leases[1:2])
        keys = task_keys(buffer.run, "math")
        buffer.client.hset(keys.rollout(leases[1].group_id), "all", b"broken")
        with pytest.raises(CorruptGroup):
            list(stream)
        assert statuses(buffer) == {"running": 4, "completed": 1, "failed": 1}
        worker.finish([*leases[2:], *worker.begin(1)])
        again = consumer.stream(MAX_TOKENS)
        assert list(again)
        assert again.batch is not None
        assert leases[1].group_id not in ids(again.batch)


def test_what_needs_the_whole_batch_is_refused_in_a_sentence(connect: Connect, worker: StepwiseWorker) -> None:
    by_batch = AdvantageSettings(baseline="batch", scale="batch")
    with connect(advantages=by_batch) as consumer, pytest.raises(ConfigError, match="take whole batches"):
        consumer.stream(MAX_TOKENS)
    with connect() as consumer, pytest.raises(ConfigError, match=r"\['math'\].*take whole batches"):
        consumer.stream(MAX_TOKENS, loss=LossSettings(sft={"math": 1.0}))
    with connect(colocated=True) as consumer, pytest.raises(ConfigError, match="colocated"):
        consumer.stream(MAX_TOKENS)


def test_a_replaced_trainer_gets_no_further_part(connect: Connect, worker: StepwiseWorker) -> None:
    with connect() as old:
        leases = worker.begin(GROUPS)
        worker.finish(leases[:1])
        stream = old.stream(MAX_TOKENS)
        next(stream)
        with connect(takeover=True):
            worker.finish(leases[1:2])
            with pytest.raises(FencedError):
                list(stream)


def test_expected_counts_are_exact_for_a_part_that_is_the_whole_batch() -> None:
    counts = {"math": BatchCounts(101, 7, 2)}
    assert expected_counts(counts, 2, {"math": 2}) == counts
    assert expected_counts(counts, 2, {"math": 6}) == {"math": BatchCounts(303, 21, 6)}
    assert gradient_scale({"math": BatchCounts(300, 20, 6)}, counts, "token") == 300 / 101
    assert gradient_scale({"math": BatchCounts(300, 20, 6)}, counts, "sequence") == 20 / 7
    assert gradient_scale({"math": BatchCounts()}, {"math": BatchCounts()}, "token") == 1.0
