"""Several ranks: each reads its share of the batch alone, and all agree on everything that they compute from it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ClaimTimeout, CorruptGroup, FencedError
from rollq.buffer.rules.settings import PayloadSettings
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import WHOLE
from rollq.consumer import Batch, Connection, Consumer, ConsumerSettings
from rollq.consumer.batches.micro_batch import assemble
from support.manual_worker import HandWorker, make_run
from support.tiny_qwen3 import tiny_qwen3

Ranks = Callable[..., list[Consumer]]


@pytest.fixture
def worker(buffer: Buffer, tmp_path: Path) -> HandWorker:
    make_run(buffer, batch_groups=6)
    return HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")


@pytest.fixture
def ranks(server_url: str, run_name: str, model_folder: Path) -> Iterator[Ranks]:
    """Connects the ranks of a trainer; keyword arguments are settings."""
    with ExitStack() as stack:

        def connect(count: int, **settings: object) -> list[Consumer]:
            base = {"timeout_s": 1, "launch_id": "one", "world_size": count, "prefetch_bytes": 0, **settings}
            return [
                stack.enter_context(
                    Consumer.connect(
                        server_url,
                        run=run_name,
                        weights=model_folder,
                        settings=ConsumerSettings.model_validate({**base, "rank": rank}),
                    )
                )
                for rank in range(count)
            ]

        yield connect


def next_batches(consumers: Sequence[Consumer]) -> list[Batch]:
    return [next(consumer) for consumer in consumers]


def frames_sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The groups that any rank reads from now on."""
    read: list[tuple[str, int]] = []
    original = Buffer.fetch

    def fetch(self: Buffer, groups: Sequence[object]) -> object:
        read.extend((group.task, group.group_id) for group in groups)  # type: ignore[attr-defined]
        return original(self, groups)  # type: ignore[arg-type]

    monkeypatch.setattr(Buffer, "fetch", fetch)
    return read


def test_each_rank_reads_its_share_and_all_compute_the_same(
    worker: HandWorker, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumers = ranks(3)
    worker.produce(6)
    read = frames_sent(monkeypatch)
    batches = next_batches(consumers)
    assert sorted(read) == [("math", number) for number in range(1, 7)]
    whole = Batch.build(1, list(batches[0].groups))
    assert len(read) == 10  # the first rank has asked for the four groups of the others
    for batch in batches:
        assert batch.counts == whole.counts
        assert batch.group_ids == whole.group_ids
        for name in ("rewards", "valid", "advantages", "sample_groups", "lengths", "sequence_groups"):
            assert np.array_equal(getattr(batch, name), getattr(whole, name)), name
    shares = [set(batch.share) for batch in batches]
    assert sorted(index for share in shares for index in share) == list(range(24))
    counts = {len(batch.micro_batches(64)) for batch in batches}
    assert len(counts) == 1
    for batch in batches:
        for index in batch.share:
            assert np.array_equal(batch.sequences[index].ids, whole.sequences[index].ids)
            assert batch.sequences[index].sample == whole.sequences[index].sample
        assert len(batch.to_torch().sequences) == len(batch.share)
    assert len(read) == 10


def test_the_loss_counts_of_the_rows_are_those_of_the_tokens(worker: HandWorker, ranks: Ranks) -> None:
    consumers = ranks(2)
    worker.produce(6)
    for batch in next_batches(consumers):
        assert batch.counts.loss_tokens == sum(int(sequence.loss_mask.sum()) for sequence in batch.sequences)
        assert len(batch.samples) == 24
        assert [sample.reward for sample in batch.samples] == pytest.approx(batch.rewards.tolist())
        assert batch.lengths.tolist() == [len(sequence.ids) for sequence in batch.sequences]


def change_rollout(buffer: Buffer, group_id: int, change: str) -> None:
    key = task_keys(buffer.run, "math").rollout(group_id)
    if change == "lost":
        buffer.client.delete(key)
    else:
        frame: Any = buffer.client.hget(key, WHOLE)
        buffer.client.hset(key, WHOLE, frame[:-9] + bytes([frame[-9] ^ 1]) + frame[-8:])


def test_a_group_whose_samples_are_gone_is_replaced_on_every_rank(
    worker: HandWorker, ranks: Ranks, buffer: Buffer
) -> None:
    consumers = ranks(2)
    worker.produce(7)
    change_rollout(buffer, 3, "lost")
    batches = next_batches(consumers)
    assert [batch.group_ids for batch in batches] == [tuple(("math", number) for number in (1, 2, 4, 5, 6, 7))] * 2
    assert buffer.counts("math").statuses["failed"] == 1  # type: ignore[index]


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 30])
def test_ranks_read_their_shares_from_a_folder_and_replace_a_group_that_it_lost(
    server_url: str, run_name: str, model_folder: Path, tmp_path: Path, prefetch_bytes: int
) -> None:
    payloads = PayloadSettings(url=str(tmp_path), min_bytes=1)
    base = {"timeout_s": 1, "launch_id": "one", "world_size": 2, "prefetch_bytes": prefetch_bytes}
    with ExitStack() as stack:
        buffer = stack.enter_context(Buffer.connect(server_url, run_name, payloads=payloads))
        make_run(buffer, batch_groups=6)
        consumers = [
            stack.enter_context(
                Consumer.connect(
                    Connection(server_url, run_name, payloads=payloads),
                    weights=model_folder,
                    settings=ConsumerSettings.model_validate({**base, "rank": rank}),
                )
            )
            for rank in range(2)
        ]
        HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker").produce(7)
        (lost,) = tmp_path.rglob("math/3.*")
        lost.unlink()
        batches = next_batches(consumers)
        assert [batch.group_ids for batch in batches] == [tuple(("math", number) for number in (1, 2, 4, 5, 6, 7))] * 2
        assert not any(batch.unreadable for batch in batches)
        assert sorted(index for batch in batches for index in batch.share) == list(range(24))
        assert buffer.counts("math").statuses["failed"] == 1  # type: ignore[index]


def check_masked_sequences_need_no_array(batch: Batch) -> None:
    """A share is assembled with an array that only its readable sequences have."""
    rows = [batch.sequences[index] for index in range(len(batch.sequences)) if index in batch.share]
    given = [row if row.is_masked else replace(row, arrays={"gain": np.ones((len(row.ids), 2))}) for row in rows]
    micro = assemble(
        given,
        range(len(given)),
        [np.ones(len(row.ids), np.float32) for row in given],
        batch.task_counts,
        padded=False,
        arrays=["gain"],
        loss_scale=batch.loss_scale,
    )
    gain = micro.arrays["gain"][0]
    assert int(gain.sum()) == 2 * sum(len(row.ids) for row in rows if not row.is_masked)


def test_a_group_that_one_rank_cannot_read_is_masked_and_the_counts_stay(
    worker: HandWorker, ranks: Ranks, buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    consumers = ranks(2)
    worker.produce(6)
    change_rollout(buffer, 3, "changed")
    with caplog.at_level(logging.ERROR):
        batches = next_batches(consumers)
    assert batches[0].counts == batches[1].counts
    assert batches[0].counts.samples == 24
    (owner,) = [batch for batch in batches if batch.unreadable]
    (other,) = [batch for batch in batches if not batch.unreadable]
    assert owner.unreadable == (("math", 3),)
    assert "its samples are masked" in caplog.text
    trained = sum(int(micro.loss_mask.sum()) for batch in batches for micro in batch.micro_batches(64))
    assert trained == sum(int(sequence.loss_mask.sum()) for sequence in owner.sequences)
    assert 0 < trained < owner.counts.loss_tokens
    assert len(owner.micro_batches(64)) == len(other.micro_batches(64))
    for batch in batches:
        check_masked_sequences_need_no_array(batch)
    with pytest.raises(CorruptGroup, match="group 3 of task 'math'"):
        other.groups[2]
    consumers[0].publish(tiny_qwen3(seed=2).state_dict(), step=1)
    for consumer, batch in zip(consumers, batches, strict=True):
        consumer.commit(batch)


def test_a_rank_whose_groups_another_trainer_has_dropped_trains_nothing(
    worker: HandWorker, ranks: Ranks, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped between its claim and its read, and its launch was replaced."""
    _, stopped = ranks(2)
    worker.produce(6)
    fetch = Buffer.fetch

    def late_fetch(self: Buffer, groups: Sequence[Any]) -> Any:
        if not groups:
            return []
        monkeypatch.undo()
        held = buffer.begin_epoch(
            trainer_id="other", launch_id="other", from_step=0, uri="none", digest="other", takeover=True
        )
        buffer.claim(held, 1, {"math": 6})
        buffer.publish(held, 1, uri="none", digest="newer")
        buffer.commit(held, 1)
        buffer.checkpoint(held, 1)
        return fetch(self, groups)

    monkeypatch.setattr(Buffer, "fetch", late_fetch)
    with pytest.raises(FencedError, match="epoch 1 was replaced by epoch 2"):
        next(stopped)


def test_rows_that_describe_other_samples_are_noticed(worker: HandWorker, ranks: Ranks, buffer: Buffer) -> None:
    (consumer,) = ranks(1)
    worker.produce(7)
    keys = task_keys(buffer.run, "math")
    rows: Any = buffer.client.hget(keys.group(2), "rows")
    buffer.client.hset(keys.group(2), "rows", rows.replace(b"[[1,0,5,", b"[[1,0,4,"))
    buffer.client.hset(keys.group(5), "rows", b"[[]")
    worker.produce(1)
    batch = next(consumer)
    assert [number for _, number in batch.group_ids] == [1, 3, 4, 6, 7, 8]


def test_what_another_rank_trained_is_gone_once_a_checkpoint_covers_it(worker: HandWorker, ranks: Ranks) -> None:
    consumers = ranks(2)
    worker.produce(6)
    batches = next_batches(consumers)
    for consumer, batch in zip(consumers, batches, strict=True):
        consumer.commit(batch)
    consumers[0].checkpoint(1)
    missing = next(index for index in range(6) if index not in batches[0].share_groups)
    with pytest.raises(CorruptGroup, match="no longer in the store"):
        batches[0].groups[missing]
    assert batches[0].groups[batches[0].share_groups[0]].group_id


def test_a_rank_that_the_release_has_not_reached_waits_for_it(worker: HandWorker, ranks: Ranks) -> None:
    consumers = ranks(2)
    worker.produce(12)
    first, second = next_batches(consumers)
    consumers[1].release(second, "drop")
    with pytest.raises(ClaimTimeout, match="rank 0 has not finished"):
        next(consumers[1])
    consumers[0].release(first, "drop")
    assert next(consumers[1]).group_ids == next(consumers[0]).group_ids != first.group_ids


def test_large_groups_are_shared_out_like_small_ones(
    worker: HandWorker, ranks: Ranks, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollq.buffer.wire.group_fields.MOST_INLINE_BYTES", 100)
    consumers = ranks(2)
    worker.produce(6)
    prefix = task_keys(buffer.run, "math").prefix
    assert len(list(buffer.client.scan_iter(match=f"{prefix}payload:*", count=1000))) == 6
    buffer.client.delete(*buffer.client.scan_iter(match=f"{prefix}payload:2:*", count=1000))
    worker.produce(1)
    batches = next_batches(consumers)
    assert [number for _, number in batches[0].group_ids] == [1, 3, 4, 5, 6, 7]
    assert batches[0].counts.loss_tokens == sum(int(sequence.loss_mask.sum()) for sequence in batches[1].sequences)
