"""Groups of the next batch are read while the present one is trained; a claim takes what it would have taken."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import ClaimedGroup
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import WHOLE
from rollq.consumer import Consumer, ConsumerSettings
from rollq.consumer.claims import prefetch
from support.manual_worker import HandWorker, make_run
from support.tiny_qwen3 import tiny_qwen3
from support.waiting import wait_until

Connect = Callable[..., Consumer]


@pytest.fixture
def worker(buffer: Buffer, tmp_path: Path) -> HandWorker:
    make_run(buffer, batch_groups=10, max_staleness=5)
    return HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "LOOK_EVERY_S", 0.02)


@pytest.fixture
def connect(server_url: str, run_name: str, model_folder: Path) -> Iterator[Connect]:
    with ExitStack() as stack:

        def open_consumer(**settings: object) -> Consumer:
            consumer = Consumer.connect(
                server_url,
                run=run_name,
                weights=model_folder,
                settings=ConsumerSettings.model_validate({"timeout_s": 1, **settings}),
            )
            return stack.enter_context(consumer)

        yield open_consumer


def frame_bytes(buffer: Buffer, group_id: int) -> int:
    return buffer.client.hstrlen(task_keys(buffer.run, "math").rollout(group_id), WHOLE)


def assert_stays(condition: Callable[[], bool]) -> None:
    """Give the thread time for many looks."""
    for _ in range(20):
        time.sleep(0.02)
        assert condition()


class Reads:
    """The groups that were read, by the thread that read them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead: list[int] = []
        self.late: list[int] = []
        original = Buffer.fetch

        def fetch(buffer: Buffer, groups: Sequence[ClaimedGroup]) -> Any:
            found = original(buffer, groups)
            is_ahead = threading.current_thread().name == "rollq-prefetch"
            (self.ahead if is_ahead else self.late).extend(group.group_id for group in groups)
            return found

        monkeypatch.setattr(Buffer, "fetch", fetch)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def test_the_next_batch_is_read_while_this_one_is_trained(connect: Connect, worker: HandWorker, reads: Reads) -> None:
    consumer = connect()
    worker.produce(20)
    first = next(consumer)
    assert first.prefetched == 0
    wait_until(lambda: len(reads.ahead) >= 10)
    consumer.commit(first)
    second = next(consumer)
    assert second.prefetched == 1
    assert sorted(reads.ahead) == [number for _, number in second.group_ids] == list(range(11, 21))
    assert sorted(reads.late) == list(range(1, 11))
    assert [group.group_id for group in second.groups] == [number for _, number in second.group_ids]
    assert all(len(group.samples) == 4 for group in second.groups)


def test_groups_that_come_meanwhile_are_read_too(connect: Connect, worker: HandWorker, reads: Reads) -> None:
    consumer = connect()
    worker.produce(13)
    first = next(consumer)
    wait_until(lambda: len(reads.ahead) >= 3)
    worker.produce(7)
    wait_until(lambda: len(reads.ahead) >= 10)
    consumer.commit(first)
    assert next(consumer).prefetched == 1


def test_a_group_that_was_made_again_is_not_taken_from_memory(
    connect: Connect, worker: HandWorker, buffer: Buffer, reads: Reads
) -> None:
    consumer = connect()
    worker.produce(20)
    first = next(consumer)
    wait_until(lambda: len(reads.ahead) >= 10)
    consumer._prefetch.pause()
    group = task_keys(buffer.run, "math").group(12)
    buffer.client.hset(group, "put_nonce", "another")
    consumer.commit(first)
    second = next(consumer)
    assert second.prefetched == 0.9
    assert reads.late[10:] == [12]


def test_memory_for_reading_ahead_is_bounded_by_the_size_of_the_frames(
    connect: Connect, worker: HandWorker, buffer: Buffer, reads: Reads
) -> None:
    connect(launch_id="one")
    worker.produce(20)
    sizes_bytes = [frame_bytes(buffer, number) for number in (11, 12, 13)]
    consumer = connect(launch_id="one", prefetch_bytes=sum(sizes_bytes))
    first = next(consumer)
    wait_until(lambda: len(reads.ahead) >= 3)
    assert_stays(lambda: reads.ahead == [11, 12, 13])
    consumer.commit(first)
    assert next(consumer).prefetched == 0.3


def test_a_frame_that_does_not_fit_is_not_read_ahead(
    connect: Connect, worker: HandWorker, buffer: Buffer, reads: Reads
) -> None:
    connect(launch_id="one")
    worker.produce(20)
    consumer = connect(launch_id="one", prefetch_bytes=frame_bytes(buffer, 11) - 1)
    first = next(consumer)
    assert_stays(lambda: reads.ahead == [])
    consumer.commit(first)
    assert next(consumer).prefetched == 0


def test_looks_that_find_nothing_new_become_rarer(
    connect: Connect, worker: HandWorker, monkeypatch: pytest.MonkeyPatch, reads: Reads
) -> None:
    waits_s: list[float] = []
    original = prefetch.Prefetch._wait_while

    def wait_while(self: prefetch.Prefetch, step: int, wait_s: float) -> None:
        waits_s.append(wait_s)
        original(self, step, min(wait_s, 0.02))

    monkeypatch.setattr(prefetch.Prefetch, "_wait_while", wait_while)
    monkeypatch.setattr(prefetch, "LEAST_OFTEN_S", 0.1)
    consumer = connect()
    worker.produce(13)
    next(consumer)
    wait_until(lambda: len(waits_s) >= 5)
    assert waits_s[:5] == [0.02, 0.04, 0.08, 0.1, 0.1]
    worker.produce(1)
    wait_until(lambda: len(reads.ahead) == 4)
    wait_until(lambda: 0.02 in waits_s[5:])


def test_a_claim_waits_for_what_is_being_read_and_for_nothing_else(
    connect: Connect, worker: HandWorker, monkeypatch: pytest.MonkeyPatch, reads: Reads
) -> None:
    reading, may_end = threading.Event(), threading.Event()
    original = Buffer.fetch

    def fetch(buffer: Buffer, groups: Sequence[ClaimedGroup]) -> Any:
        if threading.current_thread().name == "rollq-prefetch":
            reading.set()
            assert may_end.wait(30)
        return original(buffer, groups)

    monkeypatch.setattr(Buffer, "fetch", fetch)
    consumers = [connect(rank=rank, world_size=2, launch_id="one") for rank in range(2)]
    worker.produce(20)
    first, other = (next(consumer) for consumer in consumers)
    assert reading.wait(30)
    assert len(first.groups[:]) == 10  # those of the other rank are read meanwhile
    threading.Timer(0.2, may_end.set).start()
    for consumer, batch in zip(consumers, (first, other), strict=True):
        consumer.commit(batch)
    assert [next(consumer).prefetched for consumer in consumers] == [1, 1]
    assert len(reads.ahead) == len(set(reads.ahead))


def test_reading_ahead_can_be_switched_off(connect: Connect, worker: HandWorker, reads: Reads) -> None:
    consumer = connect(prefetch_bytes=0)
    worker.produce(20)
    consumer.commit(next(consumer))
    assert next(consumer).prefetched == 0
    assert reads.ahead == []


def test_a_group_that_cannot_be_read_ahead_is_replaced_at_its_claim(
    connect: Connect, worker: HandWorker, buffer: Buffer, reads: Reads
) -> None:
    consumer = connect()
    worker.produce(21)
    buffer.client.hset(task_keys(buffer.run, "math").rollout(14), WHOLE, b"no frame")
    first = next(consumer)
    wait_until(lambda: len(reads.ahead) >= 9)
    consumer.commit(first)
    second = next(consumer)
    assert [number for _, number in second.group_ids] == [*range(11, 14), *range(15, 22)]
    assert 14 not in reads.ahead


def test_each_rank_reads_ahead_what_will_be_its_share(connect: Connect, worker: HandWorker, reads: Reads) -> None:
    consumers = [connect(rank=rank, world_size=2, launch_id="one") for rank in range(2)]
    worker.produce(20)
    batches = [next(consumer) for consumer in consumers]
    wait_until(lambda: len(reads.ahead) >= 10)
    for consumer, batch in zip(consumers, batches, strict=True):
        consumer.commit(batch)
    batches = [next(consumer) for consumer in consumers]
    assert sorted(reads.ahead) == list(range(11, 21))
    assert [batch.prefetched for batch in batches] == [1, 1]


def test_nothing_is_read_ahead_once_the_consumer_is_left(connect: Connect, worker: HandWorker, reads: Reads) -> None:
    consumer = connect()
    worker.produce(10)
    next(consumer)
    consumer.__exit__(None, None, None)
    assert "rollq-prefetch" not in [thread.name for thread in threading.enumerate()]


def test_ranks_read_nothing_ahead_of_a_batch_that_is_not_full_and_all_of_it_once(
    connect: Connect, worker: HandWorker, reads: Reads
) -> None:
    consumers = [connect(rank=rank, world_size=2, launch_id="one") for rank in range(2)]
    worker.produce(10)
    batches = [next(consumer) for consumer in consumers]
    for _ in range(10):
        worker.produce(1)
    wait_until(lambda: len(reads.ahead) >= 10)
    for consumer, batch in zip(consumers, batches, strict=True):
        consumer.commit(batch)
    assert [next(consumer).prefetched for consumer in consumers] == [1, 1]
    assert sorted(reads.ahead) == list(range(11, 21))


def test_a_rank_that_comes_later_keeps_what_it_has_read(connect: Connect, worker: HandWorker, reads: Reads) -> None:
    consumers = [connect(rank=rank, world_size=2, launch_id="one") for rank in range(2)]
    worker.produce(30)
    batches = [next(consumer) for consumer in consumers]
    wait_until(lambda: len(reads.ahead) >= 10)
    for consumer, batch in zip(consumers, batches, strict=True):
        consumer.commit(batch)
    next(consumers[0])
    wait_until(lambda: len(reads.ahead) >= 15)  # the first rank reads for the step after it
    assert next(consumers[1]).prefetched == 1


def test_an_error_while_reading_ahead_does_not_reach_the_trainer(
    connect: Connect, worker: HandWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def preview(*_: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(Buffer, "preview", preview)
    consumer = connect()
    worker.produce(30)
    for _ in range(3):
        batch = next(consumer)
        wait_until(lambda: "no groups are read ahead" in caplog.text)
        consumer.commit(batch)
