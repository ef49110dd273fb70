"""The consumer on a real server: batches that stay the same, waits that end, fences that hold."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.claiming import ReleaseMode
from rollq.buffer.errors import (
    ClaimTimeout,
    ConfigError,
    FencedError,
    HistoryGone,
    NotClaimed,
    ReplayMismatch,
    ServerUnavailable,
    StoreLost,
    TrainerHeld,
    VersionFalls,
    WeightsError,
)
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Status
from rollq.buffer.weights.loading import load_weights
from rollq.consumer import Batch, Consumer, ConsumerSettings
from rollq.consumer.claims import claimer
from rollq.consumer.weights.checkpoint_format import state_dict_stream
from rollq.consumer.weights.model_folders import write_model
from rollq.consumer.weights.publisher import WeightPublisher
from rollq.consumer.weights.sources import weights_source
from support.manual_worker import HandWorker, make_run
from support.tiny_qwen3 import tiny_qwen3
from support.waiting import PATIENCE_S, wait_until

Connect = Callable[..., Consumer]


@pytest.fixture
def worker(buffer: Buffer, tmp_path: Path) -> HandWorker:
    make_run(buffer)
    return HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")


@pytest.fixture
def connect(server_url: str, run_name: str, model_folder: Path) -> Connect:
    """Connect as the trainer; keyword arguments are settings, but for those of `Consumer.connect`."""

    def open_consumer(
        resume_from: int = 0,
        stop: threading.Event | None = None,
        batch: dict[str, int] | None = None,
        weights: Path | dict[str, Any] = model_folder,
        lineage: str | None = None,
        **settings: object,
    ) -> Consumer:
        return Consumer.connect(
            server_url,
            run=run_name,
            weights=weights,
            batch=batch,
            resume_from=resume_from,
            lineage=lineage,
            settings=ConsumerSettings.model_validate({"timeout_s": 0.2, **settings}),
            stop=stop,
        )

    return open_consumer


def ids(batch: Batch) -> list[int]:
    return [group.group_id for group in batch.groups]


def consumer_steps(consumer: Consumer, worker: HandWorker, last: int) -> Iterator[Batch]:
    """Batches up to step `last`, each produced just before it is asked for."""
    while consumer.step <= last:
        worker.produce(2)
        yield next(consumer)


def statuses(buffer: Buffer) -> dict[str, int]:
    return {status.value: number for status, number in buffer.counts("math").statuses.items() if number}


def test_a_step_gives_the_same_batch_until_it_is_committed(connect: Connect, worker: HandWorker) -> None:
    with connect() as consumer:
        worker.produce(4)
        first, again = next(consumer), next(consumer)
        assert first.step == again.step == 1
        assert ids(first) == ids(again)
        assert first.counts.samples == 8
        consumer.commit(first)
        second = next(consumer)
        assert second.step == 2
        assert set(ids(second)).isdisjoint(ids(first))


def test_a_consumer_outside_a_with_block_is_refused(connect: Connect, worker: HandWorker) -> None:
    consumer = connect()
    for ask in (lambda: next(consumer), lambda: consumer.stream(64)):
        with pytest.raises(ConfigError, match="use the consumer in a `with` block: it renews the trainer's lease only"):
            ask()
    with consumer:
        pass


def test_a_commit_that_is_repeated_after_later_steps_moves_nothing_back(connect: Connect, worker: HandWorker) -> None:
    with connect() as consumer:
        worker.produce(6)
        first = next(consumer)
        consumer.commit(first)
        consumer.commit(next(consumer))
        consumer.commit(first)
        assert consumer.step == 3


def test_a_loop_that_never_commits_is_warned_once_and_one_that_commits_or_releases_is_not(
    connect: Connect, worker: HandWorker, caplog: pytest.LogCaptureFixture
) -> None:
    with connect() as consumer:
        worker.produce(4)
        consumer.release(next(consumer), "return")
        consumer.commit(next(consumer))
        next(consumer)
        assert "requested again" not in caplog.text
        for _ in range(3):
            next(consumer)
    [warning] = [record.message for record in caplog.records if "requested again" in record.message]
    assert "step 2" in warning
    assert "`commit(batch)`" in warning


def test_initial_weights_are_live_and_published_ones_follow(
    connect: Connect, worker: HandWorker, buffer: Buffer
) -> None:
    with connect() as consumer:
        worker.produce(2)
        assert worker.live is not None
        assert worker.live.version == 0
        batch = next(consumer)
        changed = tiny_qwen3(seed=9)
        consumer.publish(changed.state_dict(), step=batch.step)
        consumer.commit(batch)
        worker.swap()
        assert worker.live.version == 1
        for mine, theirs in zip(worker.model.parameters(), changed.parameters(), strict=True):
            assert mine.equal(theirs)


def test_a_trainer_that_has_taken_the_next_batch_publishes_the_step_that_it_trained(
    connect: Connect, worker: HandWorker, buffer: Buffer
) -> None:
    with connect() as consumer:
        worker.produce(4)
        consumer.commit(next(consumer))
        assert next(consumer).step == 2
        consumer.publish(tiny_qwen3(seed=9).state_dict(), step=1)
        live = buffer.live_model()
        assert live is not None
        assert live.version == 1
        with pytest.raises(ConfigError, match=r"^publish\(step=3\): the last batch was for"):
            consumer.publish(tiny_qwen3(seed=9).state_dict(), step=3)
        with pytest.raises(VersionFalls):
            consumer.publish(tiny_qwen3(seed=9).state_dict(), step=0)


def test_a_restarted_trainer_gets_the_batches_after_its_checkpoint_again(connect: Connect, worker: HandWorker) -> None:
    seen: dict[int, list[int]] = {}
    with connect() as consumer:
        for batch in consumer_steps(consumer, worker, last=3):
            seen[batch.step] = ids(batch)
            if batch.step == 3:
                break  # dies before it commits
            consumer.publish(tiny_qwen3(batch.step).state_dict(), step=batch.step)
            consumer.commit(batch)
            if batch.step == 1:
                consumer.checkpoint(1)
    with connect(resume_from=1) as consumer:
        for step in (2, 3):
            batch = next(consumer)
            assert (batch.step, ids(batch)) == (step, seen[step])
            consumer.commit(batch)
    with pytest.raises(HistoryGone, match="oldest step to resume from is 1"):
        connect(resume_from=0)


def test_every_rank_gets_its_share_of_one_batch_and_only_rank_0_moves_the_run(
    connect: Connect, worker: HandWorker, buffer: Buffer
) -> None:
    first = connect(rank=0, world_size=2, launch_id="launch")
    last = connect(rank=1, world_size=2, launch_id="launch", reduction="mean")
    with last, first:
        worker.produce(4)
        batches = [next(consumer) for consumer in (last, first)]
        assert ids(batches[0]) == ids(batches[1])
        assert [micro.loss_scale for batch in batches for micro in batch.micro_batches(10_000)] == [2.0, 1.0]
        assert buffer.client.llen(buffer.keys.weights_held) == 1
        assert sorted(batches[0].share + batches[1].share) == list(range(8))
        last.publish(tiny_qwen3(2).state_dict(), step=1)
        last.commit(batches[0])
        last.checkpoint(1)
        assert statuses(buffer) == {"completed": 2, "claimed": 2}
        assert next(last).step == 2
        first.commit(batches[1])
        assert statuses(buffer)["archived"] == 2


def test_a_rank_that_is_early_waits_for_rank_0(connect: Connect, buffer: Buffer, worker: HandWorker) -> None:
    with ThreadPoolExecutor() as pool:
        early = pool.submit(connect, rank=1, world_size=2, launch_id="launch")
        with connect(world_size=2, launch_id="launch") as first, early.result(PATIENCE_S) as last:
            assert (last.epoch, last.step) == (first.epoch, first.step)
    assert buffer.clock("math").epoch == first.epoch


def test_a_rank_whose_launch_never_starts_gives_up_in_time_and_names_it(connect: Connect, worker: HandWorker) -> None:
    with pytest.raises(ClaimTimeout, match="rank 0 of launch 'launch' has not started its epoch yet"):
        connect(rank=1, world_size=2, launch_id="launch", timeout_s=0.1)


def test_a_late_rank_of_a_launch_that_was_replaced_does_not_take_the_run_back(
    connect: Connect, worker: HandWorker
) -> None:
    with connect(world_size=2, launch_id="first"), connect(launch_id="second", takeover=True) as second:
        with pytest.raises(FencedError, match="'first' was replaced by launch 'second'"):
            connect(rank=1, world_size=2, launch_id="first")
        worker.produce(2)
        second.commit(next(second))


def test_a_second_trainer_is_refused_or_takes_over_and_the_first_one_is_fenced(
    connect: Connect, worker: HandWorker
) -> None:
    with connect() as first:
        worker.produce(2)
        batch = next(first)
        with pytest.raises(TrainerHeld, match="trainer"):
            connect(trainer_id="another")
        with connect(trainer_id="another", takeover=True) as second:
            assert ids(next(second)) == ids(batch)
            for act in (
                lambda: first.commit(batch),
                lambda: first.publish(tiny_qwen3(3).state_dict(), step=1),
                lambda: first.release(batch, "drop"),
                lambda: next(first),
            ):
                with pytest.raises(FencedError):
                    act()


def take_production_for(consumer: Consumer, seconds: float) -> None:
    """Call for a while what no function of the buffer fences."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        consumer.take_production()


def test_the_renewing_thread_learns_that_the_trainer_was_replaced(
    connect: Connect, worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollq.consumer.claims.trainer_lease.RENEW_S", 0.02)
    with connect() as first:
        with connect(takeover=True) as second:
            with pytest.raises(FencedError):
                take_production_for(first, seconds=PATIENCE_S)
            second.take_production()
        with pytest.raises(FencedError):
            next(first)


def test_the_renewing_thread_warns_of_a_server_that_evicts_by_now(
    connect: Connect,
    worker: HandWorker,
    buffer: Buffer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("rollq.consumer.claims.trainer_lease.RENEW_S", 0.02)
    monkeypatch.setattr("rollq.consumer.claims.trainer_lease.HEARTBEAT_S", 0.02)
    with connect() as consumer:
        buffer.client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            wait_until(lambda: "its maxmemory-policy is 'allkeys-lru'" in caplog.text)
        finally:
            buffer.client.config_set("maxmemory-policy", "noeviction")
        consumer.take_production()


def test_a_wait_ends_with_the_counts_and_what_holds_the_batch_back(
    connect: Connect, worker: HandWorker, buffer: Buffer
) -> None:
    with connect() as consumer:
        with pytest.raises(ClaimTimeout, match=r"step 1:\n  task 'math': nothing scheduled; 0 of 2 ready: .*producer"):
            next(consumer)
        worker.produce(1)
        with pytest.raises(ClaimTimeout, match="completed 1; 1 of 2 ready"):
            next(consumer)


def test_a_long_wait_is_explained_while_it_lasts(
    connect: Connect, worker: HandWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollq.buffer.store.waiter.REPORT_S", 0.0)
    with connect() as consumer, pytest.raises(ClaimTimeout):
        next(consumer)
    assert "no batch for step 1:\n  task 'math': nothing scheduled" in caplog.records[0].message


def test_a_waiting_consumer_wakes_when_the_last_group_arrives(connect: Connect, worker: HandWorker) -> None:
    with connect(timeout_s=PATIENCE_S) as consumer:
        worker.produce(1)
        late = threading.Timer(0.1, worker.produce, [1])
        late.start()
        assert len(next(consumer).groups) == 2
        late.join()


def test_a_stop_ends_the_iteration_also_while_it_waits(connect: Connect, worker: HandWorker) -> None:
    stop = threading.Event()
    with connect(timeout_s=PATIENCE_S, stop=stop) as consumer:
        threading.Timer(0.1, stop.set).start()
        assert list(consumer) == []


@pytest.mark.parametrize(
    ("mode", "after"),
    [("return", {"completed": 2}), ("drop", {}), ("quarantine", {"failed": 2})],
)
def test_a_released_batch_goes_where_its_mode_says(
    connect: Connect, worker: HandWorker, buffer: Buffer, mode: ReleaseMode, after: dict[str, int]
) -> None:
    with connect() as consumer:
        worker.produce(2)
        batch = next(consumer)
        consumer.release(batch, mode)
        assert statuses(buffer) == after
        worker.produce(2)
        assert next(consumer).step == 1


@pytest.mark.parametrize("early", [True, False], ids=["the other rank is early", "the other rank is late"])
def test_after_a_release_all_ranks_get_the_same_batch_without_a_barrier(
    connect: Connect, worker: HandWorker, early: bool
) -> None:
    first = connect(rank=0, world_size=2, launch_id="launch")
    last = connect(rank=1, world_size=2, launch_id="launch", timeout_s=PATIENCE_S)
    with first, last, ThreadPoolExecutor(1) as pool:
        worker.produce(2)
        released = next(first)
        if early:  # it releases its batch and asks for the next one before rank 0 has released
            last.release(next(last), "drop")
            waiting = pool.submit(next, last)
        first.release(released, "drop")
        worker.produce(2)
        batch = next(first)
        assert ids(batch) == [3, 4]
        if not early:  # it is still before its first batch, and will release what it gets
            last.release(next(last), "drop")
            waiting = pool.submit(next, last)
        assert ids(waiting.result()) == [3, 4]


def test_a_rank_does_not_wait_for_ever_for_a_release(
    connect: Connect, worker: HandWorker, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimer, "RELEASE_S", 0.5)
    first = connect(rank=0, world_size=2, launch_id="launch")
    last = connect(rank=1, world_size=2, launch_id="launch", timeout_s=PATIENCE_S)
    with first, last:
        worker.produce(2)
        assert ids(next(first)) == [1, 2]
        for group_id in (1, 2):  # a failover loses what rank 0 has read
            buffer.client.delete(task_keys(buffer.run, "math").rollout(group_id))
        with pytest.raises(ClaimTimeout, match=r"released the batch of step 1.*restart all ranks"):
            next(last)


@contextmanager
def forgotten(buffer: Buffer) -> Iterator[None]:
    """The server forgets all that happens in the body, as after a failover to a replica that was behind."""
    before = {key: buffer.client.dump(key) for key in buffer.client.scan_iter(f"*{buffer.run}*")}
    yield
    buffer.client.delete(*buffer.client.scan_iter(f"*{buffer.run}*"))
    for key, value in before.items():
        assert value is not None
        buffer.client.restore(key, 0, value)


def test_rank_0_ends_when_a_failover_has_lost_its_release(connect: Connect, worker: HandWorker, buffer: Buffer) -> None:
    with connect(timeout_s=PATIENCE_S) as consumer:
        worker.produce(2)
        batch = next(consumer)
        with forgotten(buffer):
            consumer.release(batch, "drop")
        with pytest.raises(NotClaimed, match="the batch of step 1 was released: it lost acknowledged data"):
            next(consumer)


def test_groups_that_a_lost_claim_has_freed_are_not_trained_twice(
    connect: Connect, worker: HandWorker, buffer: Buffer
) -> None:
    """Rank 0 has a batch whose claim is lost, and rank 1 claims another one for the same step."""
    first = connect(rank=0, world_size=2, launch_id="launch", timeout_s=PATIENCE_S)
    last = connect(rank=1, world_size=2, launch_id="launch", timeout_s=PATIENCE_S)
    with first, last:
        worker.produce(3)
        with forgotten(buffer):
            batch = next(first)
        buffer.client.zrem(task_keys(buffer.run, "math").status(Status.COMPLETED), 1)
        assert ids(next(last)) == [2, 3]
        with pytest.raises(NotClaimed, match="step 1 cannot be committed: its batch was replaced"):
            first.commit(batch)


def test_groups_of_a_lost_commit_are_not_trained_twice(connect: Connect, worker: HandWorker, buffer: Buffer) -> None:
    with connect(timeout_s=PATIENCE_S) as consumer:
        worker.produce(2)
        with forgotten(buffer):
            consumer.commit(next(consumer))
        with pytest.raises(
            NotClaimed, match="step 1 of task 'math' was committed, but the last step that it knows is 0"
        ):
            next(consumer)


@pytest.mark.parametrize("mode", ["return", "drop", "quarantine"])
def test_a_rank_that_reads_a_batch_while_it_is_released_gets_the_next_one(
    connect: Connect, worker: HandWorker, mode: ReleaseMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = connect(rank=0, world_size=2, launch_id="launch")
    last = connect(rank=1, world_size=2, launch_id="launch", timeout_s=PATIENCE_S)
    with first, last:
        worker.produce(2)
        batch = next(first)
        buffer = last._lease.buffer
        sizes_bytes = buffer.sizes_bytes

        def look_late(groups: Any) -> Any:
            monkeypatch.undo()
            first.release(batch, mode)
            worker.produce(2)
            return sizes_bytes(groups)

        monkeypatch.setattr(buffer, "sizes_bytes", look_late)
        got = next(last)
        if mode != "drop":  # it read the old batch in time, and its caller releases it, as on rank 0
            last.release(got, mode)
            got = next(last)
        assert ids(got) == ids(next(first))


def test_a_group_that_cannot_be_read_harms_only_itself(connect: Connect, worker: HandWorker, buffer: Buffer) -> None:
    with connect() as consumer:
        worker.produce(3)
        buffer.client.hset(task_keys(buffer.run, "math").rollout(2), "all", b"bytes that are not a frame")
        batch = next(consumer)
        assert ids(batch) == [1, 3]
        consumer.commit(batch)
        assert statuses(buffer) == {"failed": 1, "archived": 2}
        assert "quarantined" in buffer.inspect("math", 2)["error"]


def test_a_batch_has_the_groups_of_its_tasks_in_the_order_of_their_names(buffer: Buffer) -> None:
    make_run(buffer, ("math", "code", "b", "a"))
    assert list(claimer.BatchSizes.from_run(buffer, None).at(1)) == ["a", "b", "code", "math"]


def test_batch_sizes_are_those_of_the_tasks_unless_given(connect: Connect, worker: HandWorker) -> None:
    with connect(batch={"math": 1}) as consumer:
        worker.produce(1)
        assert len(next(consumer).groups) == 1
    with pytest.raises(ConfigError, match=r"'code': 1.*has the tasks \['math'\]"):
        connect(batch={"code": 1})
    with pytest.raises(ConfigError, match="3 groups would never fill: batch_groups = 2"):
        connect(batch={"math": 3})


def test_a_launch_id_belongs_to_one_starting_step(connect: Connect, worker: HandWorker) -> None:
    connect(launch_id="launch").__exit__(None, None, None)
    with pytest.raises(ConfigError, match="'launch' has started at step 0, not at 5"):
        connect(launch_id="launch", resume_from=5)


def test_a_step_that_the_run_has_not_reached_is_refused(connect: Connect, worker: HandWorker, buffer: Buffer) -> None:
    train_twice(connect, worker)
    with pytest.raises(
        HistoryGone, match=r"resume_from = 4 is beyond step 3, the run's last: .* accept_new_store = true"
    ):
        connect(resume_from=4)
    assert buffer.clock("math").epoch == 1
    with connect(resume_from=4, accept_new_store=True) as consumer:
        assert consumer.step == 5


def test_a_checkpoint_of_a_store_that_was_emptied_since_is_refused(
    connect: Connect, worker: HandWorker, buffer: Buffer
) -> None:
    with connect() as consumer:
        worker.produce(2)
        consumer.commit(next(consumer))
        lineage = consumer.lineage
    for key in buffer.client.scan_iter(match=f"rollq:{{{buffer.run}*"):
        buffer.client.delete(key)
    make_run(buffer)
    with pytest.raises(StoreLost, match=r"step 1 belongs to another store.*accept_new_store = true"):
        connect(resume_from=1, lineage=lineage)
    with connect(resume_from=1, lineage=lineage, accept_new_store=True) as consumer:
        assert consumer.step == 2


def train_twice(connect: Connect, worker: HandWorker) -> None:
    with connect(weights={"w": torch.zeros(1)}) as consumer:
        for step in (1, 2, 3):
            worker.produce(2)
            batch = next(consumer)
            consumer.publish({"w": torch.full((1,), float(step))}, step=step)
            consumer.commit(batch)


def test_a_replay_is_announced_and_other_weights_are_noticed_once(
    connect: Connect, worker: HandWorker, caplog: pytest.LogCaptureFixture
) -> None:
    train_twice(connect, worker)
    with caplog.at_level("INFO"), connect(weights={"w": torch.zeros(1)}) as consumer:
        assert "the recorded batches of steps 1 to 3 are replayed" in caplog.text
        assert consumer.replayed_through == 3
        consumer.commit(next(consumer))
        batch = next(consumer)
        consumer.publish({"w": torch.full((1,), 2.0)}, step=2)
        assert "published earlier as version" not in caplog.text, "these are the weights that were recorded"
        consumer.commit(batch)
        consumer.commit(next(consumer))
    caplog.clear()
    with caplog.at_level("INFO"), connect(weights={"w": torch.zeros(1)}) as consumer:
        for step in (1, 2):
            batch = next(consumer)
            consumer.publish({"w": torch.full((1,), 100.0 + step)}, step=step)
            consumer.commit(batch)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "weights of version 1 differ from those" in warning
    assert "recorded batches of steps 2 to 3 are replayed anyway" in warning


def test_batches_of_other_weights_are_sampled_again_where_that_is_set(
    connect: Connect, worker: HandWorker, buffer: Buffer
) -> None:
    train_twice(connect, worker)
    with connect(weights={"w": torch.zeros(1)}, on_replay_mismatch="regenerate") as consumer:
        batch = next(consumer)
        assert ids(batch) == [1, 2]
        consumer.publish({"w": torch.full((1,), 101.0)}, step=1)
        consumer.commit(batch)
        assert statuses(buffer) == {"archived": 2, "pending": 4}
        worker.produce(4)
        assert ids(next(consumer)) == [3, 4]
    with connect(weights={"w": torch.full((1,), 5.0)}, on_replay_mismatch="regenerate"):
        assert "archived" not in statuses(buffer), "the weights of the checkpoint are others too"


def test_a_launch_that_dies_while_it_begins_hides_no_other_weights(
    connect: Connect, worker: HandWorker, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_twice(connect, worker)

    def die(*args: object, **kwargs: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Buffer, "_forget_plans", die)
        with pytest.raises(RuntimeError, match="killed"):
            connect(weights={"w": torch.ones(1)}, on_replay_mismatch="regenerate")
    with connect(weights={"w": torch.ones(1)}, on_replay_mismatch="regenerate", takeover=True):
        assert statuses(buffer) == {"pending": 6}


@pytest.mark.parametrize("unreadable", [True, False])
def test_a_release_that_the_server_did_not_answer_can_be_repeated(
    connect: Connect, worker: HandWorker, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, unreadable: bool
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ServerUnavailable("for the test")

    with connect() as consumer:
        worker.produce(3)
        batch = next(consumer)
        if unreadable:
            buffer.client.hset(task_keys(buffer.run, "math").rollout(2), "all", b"bytes that are not a frame")
        with monkeypatch.context() as patch:
            patch.setattr(Buffer, "release", fail)
            with pytest.raises(ServerUnavailable):
                next(consumer) if unreadable else consumer.release(batch, "quarantine")
        if not unreadable:
            consumer.release(batch, "quarantine")
            worker.produce(1)
        assert ids(next(consumer)) == ([1, 3] if unreadable else [3, 4])


def test_a_replay_to_other_weights_fails_where_that_is_set(
    connect: Connect, worker: HandWorker, buffer: Buffer
) -> None:
    train_twice(connect, worker)
    with pytest.raises(ReplayMismatch, match=r'version 0 .*mode = "return"'):
        connect(weights={"w": torch.ones(1)}, on_replay_mismatch="fail")
    with connect(weights={"w": torch.zeros(1)}, on_replay_mismatch="fail") as consumer:
        next(consumer)
        with pytest.raises(ReplayMismatch, match=r"version 1 .*steps 2 to 3"):
            consumer.publish({"w": torch.full((1,), 101.0)}, step=1)
        live = buffer.live_model()
        assert live is not None
        assert live.version == 0


def test_weights_in_other_files_are_other_weights_in_a_replay(
    connect: Connect, worker: HandWorker, caplog: pytest.LogCaptureFixture
) -> None:
    train_twice(connect, worker)
    with connect(weights={"w": torch.zeros(1)}):
        assert "version 0 differ from" not in caplog.text
    with connect(weights={"w": torch.zeros(1)}, publish_dtype="bfloat16"):
        assert "version 0 differ from" in caplog.text
        assert "a change of publish_dtype or max_file_bytes causes this too" in caplog.text


def test_a_run_that_was_never_created_is_store_lost(connect: Connect) -> None:
    with pytest.raises(StoreLost):
        connect()


def test_settings_refuse_ranks_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="rank 2 of world_size 2"):
        ConsumerSettings(rank=2, world_size=2, launch_id="x")
    with pytest.raises(ValueError, match="launch_id"):
        ConsumerSettings(rank=0, world_size=2)


def test_stale_tokens_count_by_their_floor_after_a_rewind(connect: Connect, worker: HandWorker) -> None:
    with connect() as consumer:
        for batch in consumer_steps(consumer, worker, last=2):
            consumer.publish(tiny_qwen3(batch.step).state_dict(), step=batch.step)
            consumer.commit(batch)
        worker.produce(2)  # version 2 of an epoch that is about to die
    with connect(resume_from=0, mode="return") as consumer:
        ages = {int(age) for sequence in next(consumer).sequences for age in sequence.staleness}
        assert ages == {0}


def test_weights_by_path_stay_for_slow_workers_and_no_longer(
    connect: Connect, worker: HandWorker, tmp_path: Path, buffer: Buffer
) -> None:
    shared = tmp_path / "shared"
    (shared / "not-ours").mkdir(parents=True)
    with connect(transport="path", weights_dir=shared) as consumer:
        for batch in consumer_steps(consumer, worker, last=5):
            consumer.publish(tiny_qwen3(batch.step).state_dict(), step=batch.step)
            consumer.commit(batch)
        live = buffer.live_model()
        assert live is not None
        assert live.uri.startswith("file://")
        assert len(list(shared.glob("weights-*"))) == 3
        assert (shared / "not-ours").exists()
        worker.swap()
    with connect(resume_from=0, transport="path") as consumer, pytest.raises(ConfigError, match="weights_dir"):
        consumer.publish(tiny_qwen3().state_dict(), step=0)


def test_folders_of_weights_stay_when_they_are_live_or_of_another_run(buffer: Buffer, tmp_path: Path) -> None:
    buffer.create_run()
    others = [tmp_path / f"weights-{run}-{'a' * 16}" for run in ("other", f"{buffer.run}-2")]
    for folder in others:
        folder.mkdir()
    outlet = WeightPublisher(buffer, "path", tmp_path, 1)
    live = outlet.put(weights_source(tiny_qwen3(0).state_dict()))
    held = buffer.begin_epoch(trainer_id="a", launch_id="a", from_step=0, uri=live.uri, digest=live.digest)
    for seed in (1, 2):  # of a trainer that was replaced: they will never be published
        newest = outlet.put(weights_source(tiny_qwen3(seed).state_dict()))
    assert load_weights(buffer, *live, into=tmp_path).as_uri() == live.uri
    buffer.publish(held, 1, uri=newest.uri, digest=newest.digest)
    unpublished = outlet.put(weights_source(tiny_qwen3(3).state_dict()))
    left = {folder.as_uri() for folder in tmp_path.iterdir()} - {folder.as_uri() for folder in others}
    assert left == {newest.uri, unpublished.uri}
    assert all(folder.exists() for folder in others)


def test_weights_that_cannot_be_read_are_named(server_url: str, worker: HandWorker, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be read"):
        Consumer.connect(server_url, run=worker.buffer.run, weights=tmp_path)


def test_tied_embeddings_are_written_once_and_load_again(tmp_path: Path, model_folder: Path) -> None:
    model = tiny_qwen3(tied=True)
    model.save_pretrained(tmp_path / "saved")
    write_model(tmp_path, state_dict_stream(model.state_dict()), max_file_bytes=1 << 30, config_from=tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert loaded.state_dict()[name].equal(tensor)


def test_a_running_trainer_follows_changed_rules_and_takes_an_added_task(
    connect: Connect, worker: HandWorker, buffer: Buffer
) -> None:
    with connect() as consumer:
        worker.produce(8)
        first = next(consumer)
        consumer.publish(tiny_qwen3(1).state_dict(), step=1)
        consumer.commit(first)
        buffer.change_rules("math", {"batch_groups": 3})
        second = next(consumer)
        assert len(second.groups) == 2, "the trainer might have planned it before the change"
        consumer.publish(tiny_qwen3(2).state_dict(), step=2)
        consumer.commit(second)
        buffer.register_task("code", TaskRules(batch_groups=1, group_size=4))
        worker.produce(1, "code")
        worker.produce(3)
        third = next(consumer)
        assert sorted(group.task for group in third.groups) == ["code", "math", "math", "math"]
        consumer.publish(tiny_qwen3(3).state_dict(), step=3)
        consumer.commit(third)
        assert consumer.take_production().keys() == {"math", "code"}
        buffer.change_rules("code", {"batch_groups": 0}, batch_step=5)
        worker.produce(3)
        worker.produce(1, "code")
        fourth = next(consumer)
        consumer.publish(tiny_qwen3(4).state_dict(), step=4)
        consumer.commit(fourth)
        worker.produce(3)
        assert {group.task for group in next(consumer).groups} == {"math"}


def test_a_replayed_batch_has_the_same_masks_when_the_bound_is_lower_now(
    connect: Connect, server_url: str, buffer: Buffer, tmp_path: Path
) -> None:
    make_run(buffer, max_staleness=3)
    worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
    masks: dict[int, list[list[bool]]] = {}

    def train(consumer: Consumer, steps: range) -> None:
        for step in steps:
            batch = next(consumer)
            assert batch.step == step
            found = [sequence.loss_mask.tolist() for sequence in batch.sequences]
            assert masks.setdefault(step, found) == found
            consumer.publish(tiny_qwen3(step).state_dict(), step=step)
            consumer.commit(batch)

    with connect() as consumer:
        worker.produce(6)
        train(consumer, range(1, 4))
    buffer.change_rules("math", {"max_staleness": 0})
    with connect(resume_from=0) as consumer:
        train(consumer, range(1, 4))
    assert any(any(mask) for mask in masks[3]), "the tokens of step 3 are two steps old, and count"


def test_a_batch_of_the_loop_fits_the_sizes_from_now_on(connect: Connect, worker: HandWorker, buffer: Buffer) -> None:
    buffer.change_rules("math", {"batch_groups": 1})
    with pytest.raises(ConfigError, match="batch_groups = 1 are produced for each step"):
        connect(batch={"math": 2})
    buffer.change_rules("math", {"batch_groups": 8})
    with connect(batch={"math": 6}) as consumer:
        worker.produce(6)
        assert len(next(consumer).groups) == 6


def test_shards_may_change_their_sizes_at_different_steps(connect: Connect, buffer: Buffer) -> None:
    for number, groups in ((1, 3), (2, 2)):
        buffer.create_run()
        buffer.register_task(f"sums.{number}of2", TaskRules(batch_groups=groups, group_size=4))
    buffer.change_rules("sums.1of2", {"batch_groups": 2})
    with connect(batch={"sums": 4}):
        pass


def test_a_loop_that_neither_commits_nor_releases_is_warned_once(
    connect: Connect, worker: HandWorker, caplog: pytest.LogCaptureFixture
) -> None:
    with connect() as consumer:
        worker.produce(2)
        batch = next(consumer)
        assert [ids(next(consumer)) for _ in range(3)] == [ids(batch)] * 3
        assert caplog.text.count("was requested again, and returns the same") == 1
        consumer.commit(batch)
