"""Every wait of a trainer ends: its errors when a batch cannot fill, and the metrics of evaluations."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.batches import MAX_FILL
from rollq.buffer.calls.evaluation_metrics import evaluation_metrics
from rollq.buffer.calls.evaluations import EvaluatedGroup, EvaluationState
from rollq.buffer.calls.replies.tasks import Control, Counts
from rollq.buffer.errors import (
    BatchOver,
    ClaimTimeout,
    ConfigError,
    FencedError,
    ProductionStalled,
    ProductionStopped,
    SyncFirst,
)
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.waiter import Waiter
from rollq.buffer.values.rollouts import GroupResult, Prompt, Status
from rollq.buffer.values.trainer_state import TrainerPhase
from rollq.consumer import Batch, Consumer, ConsumerSettings
from rollq.consumer.claims.connection import Connection
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.observers import Observer
from rollq.consumer.trainer.trainer import train
from support.buffer_run import World, make_sample
from support.manual_worker import HandWorker, make_run
from support.tiny_qwen3 import tiny_qwen3
from support.waiting import PATIENCE_S, wait_until

Connect = Callable[..., Consumer]


@pytest.fixture
def connect(server_url: str, run_name: str, model_folder: Path) -> Connect:
    def open_consumer(stop: threading.Event | None = None, **settings: object) -> Consumer:
        made = ConsumerSettings.model_validate(settings)
        return Consumer.connect(server_url, run=run_name, weights=model_folder, settings=made, stop=stop)

    return open_consumer


def statuses(buffer: Buffer, task: str = "math") -> dict[str, int]:
    return {status.value: number for status, number in buffer.counts(task).statuses.items() if number}


def test_xm03_weights_that_are_too_old_are_an_error_at_once_when_newer_ones_exist(
    connect: Connect, buffer: Buffer, model_folder: Path, tmp_path: Path
) -> None:
    make_run(buffer, max_staleness=0)
    worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
    with connect() as consumer:
        worker.produce(2)
        consumer.commit(next(consumer))
        with pytest.raises(SyncFirst, match="too old for step 2; publish the weights of step 1"):
            next(consumer)
        consumer.publish(model_folder, step=1)
        worker.produce(2)
        assert next(consumer).step == 2, "the same step again"


def test_xm03_a_batch_that_is_ready_is_trained_before_the_sync(
    connect: Connect, buffer: Buffer, tmp_path: Path
) -> None:
    make_run(buffer, max_staleness=1)
    worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
    with connect() as consumer:
        worker.produce(4)
        for step in (1, 2):
            batch = next(consumer)
            assert batch.step == step
            consumer.commit(batch)
        with pytest.raises(SyncFirst):
            next(consumer)


def test_xm03_a_full_server_with_nothing_under_way_is_an_error_with_every_counter(
    fresh_server: EmbeddedServer, run_name: str, model_folder: Path, tmp_path: Path
) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        make_run(buffer)
        worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
        with Consumer.connect(fresh_server.url, run=run_name, weights=model_folder) as consumer:
            worker.produce(1)
            used = int(buffer.client.info("memory")["used_memory"])
            buffer.client.config_set("maxmemory", int(used / 0.9))
            with pytest.raises(ProductionStalled, match=r"task 'math': completed 1; 1 of 2 ready(.|\n)*memory is full"):
                next(consumer)
            buffer.client.config_set("maxmemory", used * 10)
            worker.produce(1)
            assert len(next(consumer).groups) == 2


def test_a_production_that_was_stopped_is_an_error_with_its_reason(connect: Connect, buffer: Buffer) -> None:
    make_run(buffer)
    with connect() as consumer:
        buffer.set_control("math", Control.STOPPED, "1 of the last 4 groups were worth training")
        with pytest.raises(ProductionStopped, match="1 of the last 4 groups"):
            next(consumer)


def test_xp15_a_production_that_its_hook_has_ended_ends_the_iteration(
    connect: Connect, buffer: Buffer, tmp_path: Path
) -> None:
    make_run(buffer)
    worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
    with connect() as consumer:
        worker.produce(3)
        buffer.set_control("math", Control.DONE, "its should_continue hook ended it")
        steps = []
        for batch in consumer:
            consumer.commit(batch)
            steps.append(batch.step)
    assert steps == [1]


@pytest.mark.parametrize("end", [Control.DONE, Control.STOPPED])
def test_a_group_that_is_filed_while_its_trainer_looks_is_trained_before_production_counts_as_ended(
    connect: Connect, buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Control
) -> None:
    make_run(buffer)
    worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
    counts = Buffer.counts

    def late(self: Buffer, task: str) -> Counts:
        monkeypatch.setattr(Buffer, "counts", counts)
        worker.produce(1)  # between the claim, which was short, and the question why
        buffer.set_control("math", end, "over")
        return self.counts(task)

    with connect() as consumer:
        worker.produce(1)
        monkeypatch.setattr(Buffer, "counts", late)
        assert len(next(consumer).groups) == 2


# -- taking turns ---------------------------------------------------------------------------------------------------


def test_engines_wake_when_a_batch_is_given_up_so_that_another_can_be_made(
    connect: Connect, buffer: Buffer, tmp_path: Path
) -> None:
    make_run(buffer)
    worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
    with connect(colocated=True) as consumer:
        worker.produce(2)
        batch = next(consumer)
        assert buffer.clock("math").control is Control.SLEEP
        consumer.release(batch, "quarantine")
        assert buffer.clock("math").control is Control.RUN


def test_engines_wake_when_a_group_cannot_be_read(connect: Connect, buffer: Buffer, tmp_path: Path) -> None:
    make_run(buffer)
    worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
    with connect(colocated=True, timeout_s=0.1) as consumer:
        worker.produce(2)
        buffer.client.hset(f"rollq:{{{buffer.run}:math}}:rollout:1", "0", b"garbage")
        with pytest.raises(ClaimTimeout):
            next(consumer)
        assert buffer.clock("math").control is Control.RUN


def test_a_task_that_was_paused_before_engines_slept_is_paused_when_they_wake(
    connect: Connect, buffer: Buffer, model_folder: Path, tmp_path: Path
) -> None:
    make_run(buffer)
    worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
    with connect(colocated=True) as consumer:
        worker.produce(2)
        buffer.set_control("math", Control.PAUSE, "by hand")
        next(consumer)
        assert buffer.clock("math").control is Control.SLEEP
        consumer.publish(model_folder, step=1)
        clock = buffer.clock("math")
        assert (clock.control, clock.control_reason) == (Control.PAUSE, "by hand")


def test_a_report_of_an_earlier_sleep_is_not_taken_for_one_of_this(
    connect: Connect, buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(buffer)
    worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
    report = {"state": "asleep", "asleep_for": "step 1 is being trained, since the day before"}
    buffer.report_worker("w1", report)
    waits = []
    with connect(colocated=True) as consumer:
        worker.produce(2)

        def fall_asleep(_: float) -> None:
            waits.append(buffer.clock("math").control_reason)
            buffer.report_worker("w1", {**report, "asleep_for": waits[-1]})

        monkeypatch.setattr("rollq.buffer.store.pubsub.Events.wait", lambda _, timeout_s: fall_asleep(timeout_s))
        assert next(consumer).step == 1
    assert len(waits) == 1
    assert waits[0].startswith("step 1 is being trained, since 2")


def test_sizes_follow_the_schedule_step_by_step(connect: Connect, buffer: Buffer, tmp_path: Path) -> None:
    make_run(buffer, schedule=[[2, 3]], max_staleness=5)
    worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
    with connect() as consumer:
        worker.produce(5)
        sizes = []
        for _ in range(2):
            batch = next(consumer)
            sizes.append(len(batch.groups))
            consumer.commit(batch)
    assert sizes == [2, 3]


# -- evaluation -----------------------------------------------------------------------------------------------------


@pytest.fixture
def answering(server_url: str, run_name: str, buffer: Buffer, request: pytest.FixtureRequest) -> Iterator[list[float]]:
    """A producer and a worker for evaluations, in a thread: the group of prompt i gets `rewards[i]` on every sample.

    The parameter has rules of the trained task.
    """
    make_run(buffer, **getattr(request, "param", {}))
    buffer.register_task("held_out", TaskRules(batch_groups=1, group_size=2, kind="eval"))
    rewards: list[float] = []
    stop = threading.Event()

    def work() -> None:
        with Buffer.connect(server_url, run_name) as own, own.events() as events:
            while not stop.is_set():
                for batch in own.running_batches("held_out"):
                    if not batch.closed:
                        prompts = [Prompt(str(index)) for index in range(len(rewards))]
                        with suppress(BatchOver):  # closed since
                            own.fill_batch("held_out", batch.handle, batch.size, prompts[:MAX_FILL], last=True)
                clock = own.clock("held_out")
                leased = own.lease(["held_out"], 9, worker="w", version=clock.version, epoch=clock.epoch)
                for lease in leased.leases:
                    reward = rewards[int(str(lease.prompt.content))]
                    if reward >= 0:  # a negative one is never finished, and 9 cannot be judged
                        status = "f" if reward == 9 else "c"
                        sample = make_sample(clock.version, epoch=clock.epoch, reward=reward, tokens=4, status=status)
                        own.put([GroupResult(lease, (sample, sample))])
                events.wait(0.2)

    thread = threading.Thread(target=work)
    thread.start()
    yield rewards
    stop.set()
    thread.join()


def test_xm01_an_evaluation_of_the_live_version_is_returned_and_leaves_nothing_behind(
    connect: Connect, buffer: Buffer, answering: list[float]
) -> None:
    answering += [0.0, 1.0, 0.5]
    with connect() as consumer:
        for _ in range(2):  # asking again asks all prompts again
            assert consumer.evaluate(detailed=True) == {
                "eval/held_out/count": 3,
                "eval/held_out/failed": 0,
                "eval/held_out/unfinished": 0,
                "eval/held_out/reward": 0.5,
                "eval/held_out/tokens": 4.0,
                "eval/held_out/reward_min": 0.0,
                "eval/held_out/reward_max": 1.0,
                "eval/held_out/reward_std": pytest.approx(0.408248),
                "eval/held_out/pass@1": pytest.approx(2 / 3),
                "eval/held_out/pass@2": pytest.approx(2 / 3),
                "eval/held_out/best@2": 0.5,
                "eval/held_out/worst@2": 0.5,
            }
    assert statuses(buffer, "held_out") == {}
    assert buffer.evaluation("held_out") == EvaluationState(False, 3, 3, 0, version=0, reward=0.5)
    assert buffer.counts("held_out").dropped == {"evaluated": 6}
    assert buffer.counts("math").progress["admitted"] == 0
    World(buffer).check()


def test_an_evaluation_warns_of_prompts_that_could_not_be_judged(
    connect: Connect, answering: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    answering += [1.0, 9.0]
    with connect() as consumer:
        found = consumer.evaluate()
    assert (found["eval/held_out/failed"], found["eval/held_out/reward"]) == (1, 1.0)
    assert "evaluation held_out: 1 of 2 prompts have failed, so the reward covers only the others" in caplog.text


@pytest.mark.parametrize("answering", [{"sync_weights_interval": 2}], indirect=True)
@pytest.mark.parametrize(("at_start", "evaluated"), [(True, [(0, 0), (3, 2)]), (False, [(3, 2)])])
def test_the_trainer_evaluates_the_published_weights_and_the_initial_ones_unless_told_otherwise(
    server_url: str,
    run_name: str,
    buffer: Buffer,
    answering: list[float],
    model_folder: Path,
    tmp_path: Path,
    at_start: bool,
    evaluated: list[tuple[int, int]],
) -> None:
    """XTuner refuses to evaluate between two publications."""

    class Watch(Observer):
        def on_publish(self, epoch: int, version: int, model: object) -> None:
            if version == 0:
                HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker").produce(6)

        def on_evaluation(self, line: Mapping[str, Any]) -> None:
            lines.append((line["step"], line["version"]))

    answering += [0.0, 1.0]
    lines: list[tuple[int, int]] = []
    settings = TrainerSettings(
        model=model_folder,
        output=tmp_path / "out",
        steps=3,
        micro_batch_tokens=64,
        timeout_s=PATIENCE_S,
        evaluate_every=3,
        evaluate_at_start=at_start,
    )
    assert train(Connection(server_url, run_name), settings, observers=[Watch()]) == 3
    assert lines == evaluated


def test_tc05_an_evaluation_tolerates_a_timeout(
    connect: Connect,
    buffer: Buffer,
    answering: list[float],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering += [1.0, -1.0]

    def now_s() -> float:
        """The time is up when the first prompt is finished; the first reading is the start of the wait."""
        readings.append(buffer.counts("held_out").statuses[Status.GATHERED])
        return PATIENCE_S * readings[-1] if len(readings) > 1 else 0.0

    readings: list[int] = []
    monkeypatch.setattr("rollq.consumer.claims.evaluation.Waiter", partial(Waiter, now=now_s))
    with connect() as consumer:
        found = consumer.evaluate(timeout_s=PATIENCE_S)
    assert found == {
        "eval/held_out/count": 1,
        "eval/held_out/failed": 0,
        "eval/held_out/unfinished": 1,
        "eval/held_out/reward": 1.0,
        "eval/held_out/tokens": 4.0,
    }
    assert "1 of 2 prompts are finished" in caplog.text
    assert buffer.counts("held_out").dropped == {"evaluated": 1, "cancelled": 1}
    World(buffer).check()


def test_a_trainer_that_is_stopped_drops_its_evaluation_and_has_no_result(
    connect: Connect, buffer: Buffer, answering: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    answering += [1.0, -1.0]
    stop = threading.Event()
    with connect(stop=stop) as consumer:
        done = threading.Thread(target=lambda: found.append(consumer.evaluate()))
        found: list[dict[str, float]] = []
        done.start()
        wait_until(lambda: statuses(buffer, "held_out").get("gathered") == 1)
        assert buffer.evaluation("held_out") == EvaluationState(True, 2, 1, 0)
        stop.set()
        done.join(PATIENCE_S)
        assert found == [{}]
    assert "the trainer stops, and drops its evaluation: evaluation held_out: 1 of 2 prompts are" in caplog.text
    assert buffer.evaluation("held_out") == EvaluationState(False, 2, 1, 0)


def test_what_a_dead_trainer_left_of_an_evaluation_is_dropped(
    connect: Connect, buffer: Buffer, answering: list[float]
) -> None:
    answering += [1.0]
    with connect() as consumer:
        buffer.open_batch("held_out", "0/held_out", "eval", step=0)
        assert consumer.evaluate()["eval/held_out/count"] == 1
    assert buffer.running_batches("held_out") == []
    assert buffer.client.hget(f"rollq:{{{buffer.run}:held_out}}:clock", "open_evaluations") == b"0"


def test_a_trainer_that_lost_the_run_does_not_wait_for_its_evaluation(
    connect: Connect, buffer: Buffer, answering: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering += [-1.0]
    monkeypatch.setattr("rollq.consumer.claims.trainer_lease.RENEW_S", 0.05)
    with connect(trainer_id="old") as old, connect(trainer_id="new", takeover=True), pytest.raises(FencedError):
        old.evaluate(timeout_s=PATIENCE_S)


def test_an_evaluation_that_there_is_not_is_named(connect: Connect, buffer: Buffer) -> None:
    make_run(buffer)
    with connect() as consumer, pytest.raises(ConfigError, match=r"evaluation 'tset': run .* has the evaluations \[\]"):
        consumer.evaluate(["tset"])


def test_only_rank_0_evaluates(connect: Connect, buffer: Buffer) -> None:
    make_run(buffer)
    with connect(world_size=2, launch_id="l"), connect(rank=1, world_size=2, launch_id="l") as consumer:
        assert consumer.evaluate() == {}


def test_tc05_metrics_are_means_over_prompts_and_count_what_is_missing() -> None:
    groups = [
        EvaluatedGroup(1.0, 10, 2, failed=False),
        EvaluatedGroup(0.0, 2, 2, failed=False),
        EvaluatedGroup(None, 0, 0, failed=True),
        EvaluatedGroup(None, 0, 0, failed=False),
    ]
    assert evaluation_metrics("x", groups) == {
        "eval/x/count": 2, "eval/x/failed": 1, "eval/x/unfinished": 1, "eval/x/reward": 0.5, "eval/x/tokens": 3.0,
    }  # fmt: skip
    assert evaluation_metrics("x", []) == {"eval/x/count": 0, "eval/x/failed": 0, "eval/x/unfinished": 0}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_task_that_stays_empty_is_taken_out_of_the_batch_that_the_trainer_waits_for(
    connect: Connect, buffer: Buffer, tmp_path: Path, restarted: bool
) -> None:
    make_run(buffer, ("math", "code"))
    worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
    found: list[Batch] = []

    def take() -> None:
        with connect(takeover=True, timeout_s=PATIENCE_S) as consumer:
            found.append(next(consumer))

    with connect(timeout_s=0.05) as consumer:
        worker.produce(2, "math")
        with pytest.raises(ClaimTimeout):
            next(consumer)
    waiting = threading.Thread(target=take)
    if not restarted:
        waiting.start()
        until_it_waits(buffer)
    buffer.change_rules("code", {"batch_groups": 0}, batch_step=1)
    if restarted:
        waiting.start()
    waiting.join()
    (batch,) = found
    assert [group.task for group in batch.groups] == ["math", "math"]
    assert batch.step == 1


def until_it_waits(buffer: Buffer) -> None:
    """Wait until a trainer says that it waits for groups."""
    with buffer.events() as events:
        for _ in Waiter(events, stop=threading.Event(), timeout_s=PATIENCE_S, explain=lambda: "no trainer waits"):
            state = buffer.trainer_state()
            if state is not None and state.phase is TrainerPhase.WAITING:
                return


def test_all_ranks_get_the_batch_of_the_rules_that_were_changed_while_they_waited(
    server_url: str, run_name: str, buffer: Buffer, model_folder: Path, tmp_path: Path
) -> None:
    make_run(buffer, ("math", "code"))
    worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
    found: list[tuple[int, ...]] = []

    def take(rank: int) -> None:
        settings = ConsumerSettings(rank=rank, world_size=2, launch_id="one", timeout_s=PATIENCE_S)
        with Consumer.connect(server_url, run=run_name, weights=model_folder, settings=settings) as consumer:
            ready.wait(PATIENCE_S)
            batch = next(consumer)
            found.append(tuple(group_id for _, group_id in batch.group_ids))
            ready.wait(PATIENCE_S)

    ready = threading.Barrier(3)
    ranks = [threading.Thread(target=take, args=(rank,)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    ready.wait(PATIENCE_S)
    worker.produce(2, "math")
    buffer.change_rules("code", {"batch_groups": 0}, batch_step=1)
    ready.wait(PATIENCE_S)
    for rank in ranks:
        rank.join()
    assert found == [(1, 2), (1, 2)]
