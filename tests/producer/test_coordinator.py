"""The batch coordinator, on a real server, with workers played by hand."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rq import Queue

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Shortfall
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.errors import BatchOver, BatchRefused, ClaimTimeout, ConfigError, RollqError, UnknownBatch
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.tickets import open_queue
from rollq.buffer.values.rollouts import FinishReason, GroupResult, Lease, Prompt, Sample, SampleStatus
from rollq.consumer.batches.batch import Batch
from rollq.producer.batches import BatchResult, OverRollout, Stage
from rollq.producer.coordinator import BatchCoordinator
from rollq.producer.pipeline import ScoredGroup, clip_rewards, drop_zero_advantage, group_normalised
from support.buffer_run import OUTSIDE_BYTES, World, make_sample, payloads_in
from support.waiting import PATIENCE_S

PROMPTS = [Prompt("one"), Prompt("two"), Prompt("three")]
SHORT_S = 0.05


@pytest.fixture
def world(server: EmbeddedServer, run_name: str) -> Iterator[World]:
    with Buffer.connect(server.url, run_name) as buffer:
        world = World(buffer)
        yield world
        world.check()


@pytest.fixture
def queue(server: EmbeddedServer, run_name: str) -> Queue:
    return open_queue(server.url, run_name)


def finish(world: World, n: int, *rewards: float, task: str = "math") -> None:
    """A worker makes `n` groups; the samples of each get `rewards`."""
    leases = world.lease(n, task)
    assert len(leases) == n
    version = world.buffer.clock(task).version
    samples = tuple(make_sample(version, reward=reward) for reward in rewards or (0.0, 1.0))
    assert world.buffer.put([GroupResult(lease, samples) for lease in leases]) == [PutOutcome.GATHERED] * n


def test_a_coordinator_removes_payloads_that_groups_have_dropped(
    server: EmbeddedServer, run_name: str, queue: Queue, tmp_path: Path
) -> None:
    with Buffer.connect(server.url, run_name, payloads=payloads_in(tmp_path / "payloads")) as buffer:
        world = World(buffer).start()
        coordinator = BatchCoordinator(buffer, queue)
        given_up = coordinator.submit("math", "1", PROMPTS[:1], step=1)
        assert world.put(world.lease(1), text="x" * OUTSIDE_BYTES) == [PutOutcome.GATHERED]
        coordinator.abort("math", given_up, "it is not needed")
        assert any(buffer.payloads.pages())
        batch = coordinator.submit("math", "2", PROMPTS[:1], step=1)
        finish(world, 1)
        coordinator.finalize("math", batch, timeout_s=PATIENCE_S)
        assert not any(buffer.payloads.pages())


def test_a_batch_goes_all_the_way_to_the_trainer(world: World, queue: Queue) -> None:
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue, pipeline=[clip_rewards(0.0, 0.5), group_normalised])
    batch = coordinator.submit("math", "1", PROMPTS[:2], step=1)
    assert queue.count == 2, "a worker finds a ticket for each group"
    finish(world, 2)
    assert isinstance(world.buffer.claim(world.held, 1, {"math": 2}), Shortfall), (
        "nothing is trained before its batch is"
    )
    result = coordinator.finalize("math", batch, timeout_s=PATIENCE_S)
    assert result.finished_task_count == 2
    trained = Batch.build(1, world.buffer.fetch(world.claim(1).groups))
    assert trained.rewards.tolist() == [0.0, 0.5, 0.0, 0.5]
    assert [round(float(a), 3) for a in trained.advantages] == [-1.0, 1.0, -1.0, 1.0]


def test_a_batch_of_which_every_group_failed_says_so_with_the_last_error(
    world: World, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    world.start(math={"max_tries": 1})
    coordinator = BatchCoordinator(world.buffer, queue)
    for batch_id, fail in (("1", 1), ("2", 2)):
        batch = coordinator.submit("math", batch_id, PROMPTS[:2], step=1)
        world.buffer.hand_back(world.lease(fail), counted=True, error="ValueError: no reward")
        world.put(world.lease(2 - fail))
        coordinator.finalize("math", batch, timeout_s=PATIENCE_S)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ["batch 2: all 2 groups failed; the last error: ValueError: no reward"]


def test_tc01_submitting_again_gives_the_same_handle_and_a_finished_id_a_new_one(world: World, queue: Queue) -> None:
    """Trinity raises when an id is submitted twice; here the same content is the same batch."""
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue)
    first = coordinator.submit("math", "1", PROMPTS, step=1)
    assert coordinator.submit("math", "1", PROMPTS, step=1) == first
    assert world.statuses() == {"pending": 3}
    with pytest.raises(ValueError, match="'1' is running with other content"):
        coordinator.submit("math", "1", PROMPTS[:2], step=1)
    finish(world, 3)
    result = coordinator.finalize("math", first, timeout_s=PATIENCE_S)
    again = coordinator.submit("math", "1", PROMPTS[:1], step=2)
    assert again != first
    assert coordinator.finalize("math", first, timeout_s=PATIENCE_S) == result, "a late finalize of the old one"
    assert coordinator.stage("math", again) is Stage.RUNNING
    assert world.statuses() == {"completed": 3, "pending": 1}


def test_tc01_an_empty_batch_is_complete_at_once(world: World, queue: Queue) -> None:
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue)
    batch = coordinator.submit("math", "1", [], step=1)
    assert coordinator.finalize("math", batch, timeout_s=0).finished_task_count == 0
    assert coordinator.stage("math", batch) is Stage.FINALIZED


def test_tc01_a_batch_that_was_submitted_in_part_is_pending_until_somebody_submits_it_again(
    world: World, queue: Queue
) -> None:
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue)
    batch = coordinator.submit("math", "whole", PROMPTS, step=1)
    assert coordinator.stage("math", batch) is Stage.RUNNING
    state = world.buffer.open_batch("math", "part", "train", step=1)
    world.buffer.fill_batch("math", state.handle, 0, PROMPTS[:1], last=False)
    assert coordinator.stage("math", "part") is Stage.PENDING


def test_tc02_batches_that_are_finalized_together_have_their_own_results(world: World, queue: Queue) -> None:
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue)
    for batch_id, prompts in (("1", PROMPTS), ("2", PROMPTS[:2]), ("3", PROMPTS[:1])):
        coordinator.submit("math", batch_id, prompts, step=1)
    finish(world, 3, 0.0, 0.5)
    finish(world, 2, 1.0, 2.0)
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(coordinator.finalize, "math", batch, timeout_s=PATIENCE_S) for batch in ("1", "2", "3")]
        finish(world, 1, 3.0, 3.0)
    found = [(end.result().finished_task_count, end.result().metrics["reward"]) for end in ends]
    assert found == [(3, 0.25), (2, 1.5), (1, 3.0)]
    assert world.statuses() == {"completed": 6}


@pytest.mark.parametrize("finished", [0, 2])
def test_tc02_a_batch_that_is_not_complete_in_time_is_a_timeout(world: World, queue: Queue, finished: int) -> None:
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue)
    batch = coordinator.submit("math", "1", PROMPTS, step=1)
    if finished:
        finish(world, finished)
    with pytest.raises(TimeoutError, match=f"{finished} of 3 groups"):
        coordinator.finalize("math", batch, timeout_s=SHORT_S)
    assert coordinator.stage("math", batch) is Stage.RUNNING


def test_tc02_with_min_wait_num_the_rest_is_cancelled_and_what_is_there_finalized(world: World, queue: Queue) -> None:
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue)
    batch = coordinator.submit("math", "1", PROMPTS, step=1)
    (running, *_) = world.lease(1)
    finish(world, 1)
    with pytest.raises(TimeoutError):
        coordinator.finalize("math", batch, timeout_s=SHORT_S, min_wait_num=2)
    result = coordinator.finalize("math", batch, timeout_s=PATIENCE_S, min_wait_num=1)
    assert (result.finished_task_count, result.metrics["unfinished"]) == (1, 2)
    assert world.put([running]) == [PutOutcome.REFUSED]
    assert world.statuses() == {"completed": 1, "aborted": 2}


def test_tc02_min_wait_num_above_the_size_is_clamped_with_a_warning(
    world: World, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue)
    batch = coordinator.submit("math", "1", PROMPTS, step=1)
    finish(world, 3)
    coordinator.finalize("math", batch, timeout_s=PATIENCE_S, min_wait_num=9)
    assert "min_wait_num = 9 exceeds its 3 groups; using 3" in caplog.text


def test_tc03_a_pipeline_that_fails_loses_no_result(world: World, queue: Queue) -> None:
    """Trinity loses the results of a batch whose pipeline raises; here it is running again with all of them."""
    world.start()

    def broken(groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        raise ZeroDivisionError("an operator's mistake")

    batch = BatchCoordinator(world.buffer, queue).submit("math", "1", PROMPTS, step=1)
    finish(world, 3)
    with pytest.raises(ZeroDivisionError, match="an operator's mistake"):
        BatchCoordinator(world.buffer, queue, pipeline=[broken]).finalize("math", batch, timeout_s=PATIENCE_S)
    assert world.statuses() == {"gathered": 3}
    coordinator = BatchCoordinator(world.buffer, queue)
    assert coordinator.stage("math", batch) is Stage.RUNNING
    assert coordinator.finalize("math", batch, timeout_s=PATIENCE_S).finished_task_count == 3


def test_tc03_what_the_pipeline_drops_is_filtered_and_what_it_keeps_is_trained(world: World, queue: Queue) -> None:
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue, pipeline=[drop_zero_advantage])
    batch = coordinator.submit("math", "1", PROMPTS, step=1)
    finish(world, 1, 1.0, 1.0)
    finish(world, 2)
    result = coordinator.finalize("math", batch, timeout_s=PATIENCE_S)
    assert result.metrics == {"groups": 2, "filtered": 1, "failed": 0, "unfinished": 0, "reward": pytest.approx(4 / 6)}
    assert world.statuses() == {"completed": 2, "filtered": 1}


def test_tc04_two_processes_finalize_once_and_get_the_same(world: World, queue: Queue) -> None:
    world.start()
    started, calls = threading.Barrier(2), []

    def slow(groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        calls.append(len(groups))
        return groups

    with Buffer.connect(server_url(world), world.buffer.run) as other:
        coordinators = [BatchCoordinator(b, queue, pipeline=[slow]) for b in (world.buffer, other)]
        batch = coordinators[0].submit("math", "1", PROMPTS, step=1)
        finish(world, 3)
        results: list[object] = []

        def end(coordinator: BatchCoordinator) -> None:
            started.wait()
            results.append(coordinator.finalize("math", "1", timeout_s=PATIENCE_S))

        threads = [threading.Thread(target=end, args=[coordinator]) for coordinator in coordinators]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert calls == [3]
    assert results[0] == results[1]
    assert coordinators[0].finalize("math", batch, timeout_s=0) == results[0]


def server_url(world: World) -> str:
    options = world.buffer.client.connection_pool.connection_kwargs
    return f"redis://{options['host']}:{options['port']}/{options['db']}"


def test_tc04_a_wrong_type_and_an_unknown_id_are_different_errors(world: World, queue: Queue) -> None:
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue)
    batch = coordinator.submit("math", "1", PROMPTS, step=1)
    with pytest.raises(ValueError, match="'1' is of type 'train', not 'eval'"):
        coordinator.finalize("math", batch, timeout_s=0, batch_type="eval")
    with pytest.raises(KeyError, match="'2' of task 'math' was never submitted"):
        coordinator.finalize("math", "2", timeout_s=0)


@pytest.mark.parametrize("keep", [True, False])
def test_tc06_abort_drops_what_is_queued_or_under_way_and_keeps_results_if_asked(
    world: World, queue: Queue, keep: bool
) -> None:
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue)
    batch = coordinator.submit("math", "1", PROMPTS, step=1)
    (running,) = world.lease(1)
    finish(world, 1)
    for _ in range(2):  # the second one finds it over
        coordinator.abort("math", batch, "changed our mind", keep_partial_results=keep)
    assert world.put([running]) == [PutOutcome.REFUSED]
    assert coordinator.stage("math", batch) is Stage.ABORTED
    assert world.statuses() == ({"completed": 1} if keep else {})
    assert world.buffer.counts("math").dropped == {"cancelled": 2 if keep else 3}
    with pytest.raises(BatchOver, match="aborted: changed our mind"):
        coordinator.finalize("math", batch, timeout_s=0)


def test_tc06_aborting_what_is_unknown_or_finished_does_nothing(world: World, queue: Queue) -> None:
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue)
    coordinator.abort("math", "never", "no reason")
    batch = coordinator.submit("math", "1", PROMPTS, step=1)
    finish(world, 3)
    result = coordinator.finalize("math", batch, timeout_s=PATIENCE_S)
    coordinator.abort("math", batch, "too late")
    assert coordinator.finalize("math", batch, timeout_s=0) == result
    assert world.statuses() == {"completed": 3}


def test_tc07_the_result_names_its_batch_and_its_outcome(world: World, queue: Queue) -> None:
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue)
    coordinator.submit("math", "17", PROMPTS, step=1)
    finish(world, 3)
    result = coordinator.finalize("math", "17", timeout_s=PATIENCE_S)
    assert (result.batch_id, result.batch_type, result.finished_task_count) == ("17", "train", 3)
    assert result.metrics["reward"] == 0.5


def test_tc07_the_result_has_the_means_of_parts_of_rewards_and_of_operators(world: World, queue: Queue) -> None:
    def look(groups: Sequence[ScoredGroup]) -> tuple[Sequence[ScoredGroup], dict[str, float]]:
        return groups, {"look/groups": len(groups)}

    world.start()
    coordinator = BatchCoordinator(world.buffer, queue, pipeline=[look])
    coordinator.submit("math", "17", PROMPTS, step=1)
    for turns, lease in enumerate(world.lease(3)):
        parts = {"right": 0.25, "format": 0.25}
        made = replace(
            make_sample(0), reward=0.5, reward_parts=parts, extra={"turns": turns, "judge_s": 1.0, "who": "w"}
        )
        world.buffer.put([GroupResult(lease, (made, replace(made, reward_parts={"right": 0.75})))])
    result = coordinator.finalize("math", "17", timeout_s=PATIENCE_S)
    found = {name: value for name, value in result.metrics.items() if "/" in name}
    assert found == {
        "rollout/right": 0.5, "rollout/format": 0.25, "rollout/turns": 1.0, "experience_pipeline/look/groups": 3.0
    }  # fmt: skip


def test_tc09_over_rollout_leaves_the_slowest_to_the_pool(world: World, queue: Queue) -> None:
    """Trinity discards what is not finished; here it joins the pool of interrupted groups, which producers draw on."""
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue, over_rollout=OverRollout(ratio=0.34, grace_s=SHORT_S))
    batch = coordinator.submit("math", "1", PROMPTS, step=1)
    finish(world, 2)
    result = coordinator.finalize("math", batch, timeout_s=PATIENCE_S)
    assert result.finished_task_count == 2
    assert world.statuses() == {"completed": 2, "aborted": 1}
    assert world.buffer.recycle("math", epoch=1, target=9, limit=9) == 1


CUT_SAMPLE = Sample((), SampleStatus.FAILED, FinishReason.ABORT, error="its batch was cut off")


def wait_for_cut_off(world: World, leases: Sequence[Lease]) -> None:
    """Renew leases, as a worker does, until it is asked for what it has."""
    deadline_s = time.monotonic() + PATIENCE_S
    while world.buffer.renew(leases).cut_off != list(leases):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@contextmanager
def finalizing(world: World, queue: Queue, over_rollout: OverRollout, **given: Any) -> Iterator[Future[BatchResult]]:
    """Finalize batch "1" in another process, as it were."""
    with Buffer.connect(server_url(world), world.buffer.run) as other, ThreadPoolExecutor(1) as threads:
        coordinator = BatchCoordinator(other, queue, over_rollout=over_rollout)
        yield threads.submit(coordinator.finalize, batch="1", **given)


def test_a_batch_that_is_cut_off_counts_groups_with_enough_finished_samples(world: World, queue: Queue) -> None:
    """Trinity's `return_partial_tasks`. A group with fewer samples leaves the batch, and keeps those it has."""
    world.start(math={"group_size": 3, "min_valid_samples": 2, "partial_rollout": True})
    coordinator = BatchCoordinator(world.buffer, queue)
    coordinator.submit("math", "1", [*PROMPTS, Prompt("four"), Prompt("five")], step=1)
    whole, enough, too_few, given_back = world.lease(4)
    made, unfinished = make_sample(0, reward=0.5), make_sample(0, status="a")
    world.put([whole])
    over_rollout = OverRollout(ratio=0.8, grace_s=0.0, partial_groups=True)
    with finalizing(world, queue, over_rollout, task="math", timeout_s=PATIENCE_S) as ending:
        wait_for_cut_off(world, [enough, too_few, given_back])
        world.buffer.hand_back([given_back])
        assert world.buffer.put(
            [GroupResult(too_few, (made, unfinished, unfinished)), GroupResult(enough, (made, CUT_SAMPLE, made))]
        ) == [PutOutcome.ABORTED, PutOutcome.GATHERED]
    result = ending.result()
    assert (result.finished_task_count, result.metrics["groups"], result.metrics["unfinished"]) == (2, 2, 3)
    assert result.metrics["reward"] == pytest.approx((3 * 1.0 + 2 * 0.5) / 5)
    assert world.statuses() == {"completed": 2, "aborted": 3}
    world.buffer.recycle("math", epoch=1, target=9, limit=9)
    kept = [sum(sample.response_tokens for sample in lease.samples) for lease in world.lease(3)]
    assert sorted(kept) == [0, 0, 9]


def test_a_worker_that_does_not_answer_holds_a_cut_off_batch_up_for_a_moment(
    world: World, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollq.producer.coordinator.CUT_OFF_S", SHORT_S)
    world.start(math={"min_valid_samples": 1})
    over_rollout = OverRollout(ratio=0.5, grace_s=0.0, partial_groups=True)
    coordinator = BatchCoordinator(world.buffer, queue, over_rollout=over_rollout)
    batch = coordinator.submit("math", "1", PROMPTS[:2], step=1)
    whole, silent = world.lease(2)
    world.put([whole])
    assert coordinator.finalize("math", batch, timeout_s=PATIENCE_S).finished_task_count == 1
    assert world.put([silent]) == [PutOutcome.REFUSED]
    assert world.statuses() == {"completed": 1, "aborted": 1}


def test_a_batch_that_is_cut_off_ends_although_its_pipeline_failed_at_first(world: World, queue: Queue) -> None:
    world.start(math={"min_valid_samples": 1})
    over_rollout = OverRollout(ratio=0.5, grace_s=0.0, partial_groups=True)

    def broken(groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        raise RuntimeError("an operator that fails")

    coordinator = BatchCoordinator(world.buffer, queue, over_rollout=over_rollout, pipeline=[broken])
    batch = coordinator.submit("math", "1", PROMPTS[:2], step=1)
    finish(world, 1)
    with pytest.raises(RuntimeError):
        coordinator.finalize("math", batch, timeout_s=PATIENCE_S)
    assert world.statuses() == {"gathered": 1, "aborted": 1}
    result = BatchCoordinator(world.buffer, queue).finalize("math", batch, timeout_s=PATIENCE_S)
    assert (result.finished_task_count, result.metrics["unfinished"]) == (1, 1)


def test_samples_that_were_left_out_are_made_when_their_group_is_sampled_again(world: World, queue: Queue) -> None:
    """It was put after the coordinator had begun to finalize, so it is not of the batch."""
    world.start(math={"group_size": 3, "min_valid_samples": 1, "partial_rollout": True})
    coordinator = BatchCoordinator(world.buffer, queue)
    batch = coordinator.submit("math", "1", PROMPTS[:1], step=1)
    (late,) = world.lease(1)
    world.buffer.cut_off("math", batch.handle)
    world.buffer.begin_finalize("math", batch.handle, "me", lease_s=60)
    made = make_sample(0)
    assert world.buffer.put([GroupResult(late, (made, CUT_SAMPLE, CUT_SAMPLE))]) == [PutOutcome.GATHERED]
    world.buffer.end_finalize("math", batch.handle, "me", b"{}", {})
    assert world.buffer.recycle("math", epoch=1, target=9, limit=9) == 1
    (again,) = world.lease(1)
    assert [sample.status for sample in again.samples] == [SampleStatus(letter) for letter in "cpp"]
    others = make_sample(0, reward=0.5)
    assert world.buffer.put([GroupResult(again, (made, others, others))]) == [PutOutcome.COMPLETED]
    (group,) = world.buffer.fetch(world.claim(1, math=1).groups)
    assert [sample.reward for sample in group.samples] == [1.0, 0.5, 0.5]


def test_aborting_a_batch_that_is_cut_off_drops_the_groups_that_left_it(world: World, queue: Queue) -> None:
    world.start(math={"min_valid_samples": 1})
    coordinator = BatchCoordinator(world.buffer, queue)
    batch = coordinator.submit("math", "1", PROMPTS, step=1)
    finish(world, 1)
    assert world.buffer.cut_off("math", batch.handle) == 0
    coordinator.abort("math", batch, "it is not needed")
    assert world.statuses() == {}


def test_nothing_is_waited_for_where_groups_need_all_their_samples(world: World, queue: Queue) -> None:
    world.start()
    batch = BatchCoordinator(world.buffer, queue).submit("math", "1", PROMPTS, step=1)
    leases = world.lease(3)
    assert world.buffer.cut_off("math", batch.handle) == 0
    assert world.buffer.renew(leases).cut_off == []


def test_an_evaluation_that_is_cut_off_counts_groups_with_enough_finished_samples(
    world: World, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group with fewer samples stays its worker's, since it would start again as a whole."""
    monkeypatch.setattr("rollq.producer.coordinator.CUT_OFF_S", 1.0)
    world.start(math={}, held_out={"kind": "eval", "min_valid_samples": 1})
    coordinator = BatchCoordinator(world.buffer, queue)
    coordinator.submit("held_out", "1", PROMPTS[:2], batch_type="eval", step=1)
    enough, too_few = world.lease(2, "held_out")
    over_rollout = OverRollout(partial_groups=True)
    given = {"task": "held_out", "batch_type": "eval", "timeout_s": SHORT_S}
    with finalizing(world, queue, over_rollout, **given) as ending:
        wait_for_cut_off(world, [enough, too_few])
        made = make_sample(0, reward=0.5)
        assert world.buffer.put([GroupResult(enough, (made, CUT_SAMPLE))]) == [PutOutcome.GATHERED]
    metrics = ending.result().metrics
    assert (metrics["eval/1/reward"], metrics["eval/1/count"], metrics["eval/1/unfinished"]) == (0.5, 1, 1)
    assert metrics["eval/1/tokens"] == 3, "of the sample that completed"
    assert world.statuses("held_out") == {}


@pytest.mark.parametrize(
    ("size", "ratio", "enough"), [(10, 0.0, 10), (10, 0.25, 8), (3, 0.34, 2), (1, 0.9, 1), (0, 0.5, 0)]
)
def test_tc09_enough_is_the_size_less_the_ratio_rounded_up(size: int, ratio: float, enough: int) -> None:
    assert OverRollout(ratio).enough(size) == enough


@pytest.mark.parametrize("ratio", [-0.1, 1.0])
def test_tc09_a_ratio_that_leaves_nothing_or_more_than_all_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="ratio"):
        OverRollout(ratio)


def test_tc10_a_group_whose_tries_are_spent_is_failed_and_its_batch_continues_without_it(
    world: World, queue: Queue
) -> None:
    world.start(math={"max_tries": 2})
    coordinator = BatchCoordinator(world.buffer, queue)
    batch = coordinator.submit("math", "1", PROMPTS[:1], step=1)
    for _ in range(2):
        world.buffer.hand_back(world.lease(1), counted=True, error="attempt was cut off after 1800 s")
    result = coordinator.finalize("math", batch, timeout_s=PATIENCE_S)
    assert result.metrics["failed"] == 1
    assert world.statuses() == {"failed": 1}


def test_tc11_a_coordinator_that_is_started_again_finds_its_batches_as_they_were(world: World, queue: Queue) -> None:
    world.start()
    BatchCoordinator(world.buffer, queue).submit("math", "1", PROMPTS, step=1)
    finish(world, 1)
    with Buffer.connect(server_url(world), world.buffer.run) as buffer:
        again = BatchCoordinator(buffer, queue)
        assert again.stage("math", "1") is Stage.RUNNING
        finish(world, 2)
        assert again.finalize("math", "1", timeout_s=PATIENCE_S).finished_task_count == 3


def test_tc11_one_that_died_while_it_finalized_is_replaced(world: World, queue: Queue) -> None:
    world.start()
    coordinator = BatchCoordinator(world.buffer, queue)
    batch = coordinator.submit("math", "1", PROMPTS, step=1)
    finish(world, 3)
    dead = world.buffer.begin_finalize("math", batch.handle, "dead", lease_s=0.001)
    assert dead.state == "finalizing"
    assert coordinator.finalize("math", batch, timeout_s=PATIENCE_S).finished_task_count == 3
    late = world.buffer.end_finalize("math", batch.handle, "dead", b"{}", {})
    assert late.state == "finalized"
    assert world.statuses() == {"completed": 3}


def test_groups_that_grew_too_old_while_they_were_gathered_expire(world: World, queue: Queue) -> None:
    world.start(math={"max_staleness": 0}).complete(2)
    coordinator = BatchCoordinator(world.buffer, queue)
    batch = coordinator.submit("math", "1", PROMPTS[:1], step=1)
    finish(world, 1)
    world.train(1)
    coordinator.finalize("math", batch, timeout_s=PATIENCE_S)
    assert world.statuses() == {"archived": 2, "expired": 1}


@pytest.mark.parametrize("batch_id", ["", "a b", "x" * 65])
def test_an_id_that_cannot_be_a_key_is_refused(world: World, queue: Queue, batch_id: str) -> None:
    world.start()
    with pytest.raises(ValueError, match="1 to 64 characters"):
        BatchCoordinator(world.buffer, queue).submit("math", batch_id, PROMPTS, step=1)


def test_tc05_an_evaluation_tolerates_a_timeout_writes_nothing_for_training_and_is_named_after_its_id(
    world: World, queue: Queue
) -> None:
    world.start(math={}, held_out={"kind": "eval"})
    coordinator = BatchCoordinator(world.buffer, queue)
    batch = coordinator.submit("held_out", "0/gsm8k/test", PROMPTS, batch_type="eval", step=0)
    finish(world, 1, 0.0, 0.5, task="held_out")
    (lease,) = world.lease(1, "held_out")
    made = replace(make_sample(0), reward=0.25, reward_parts={"right": 0.25})
    world.buffer.put([GroupResult(lease, (made, made))])
    result = coordinator.finalize("held_out", batch, timeout_s=SHORT_S, batch_type="eval", detailed=True)
    assert (result.batch_type, result.finished_task_count) == ("eval", 2)
    assert result.metrics["eval/gsm8k/test/reward"] == 0.25
    assert result.metrics["eval/gsm8k/test/count"] == 2
    assert result.metrics["eval/gsm8k/test/parts/right"] == 0.25
    assert {"eval/gsm8k/test/reward_min", "eval/gsm8k/test/reward_max", "eval/gsm8k/test/reward_std"} <= set(
        result.metrics
    )
    assert coordinator.finalize("held_out", batch, timeout_s=0, batch_type="eval") == result
    assert world.statuses("held_out") == {}
    assert world.buffer.counts("held_out").dropped == {"evaluated": 2, "cancelled": 1}


@pytest.mark.parametrize(
    ("error", "base"), [(BatchRefused, ValueError), (UnknownBatch, KeyError), (ClaimTimeout, TimeoutError)]
)
def test_errors_can_be_caught_as_those_of_rollq_and_as_built_in_ones(error: type[Exception], base: type) -> None:
    assert issubclass(error, RollqError)
    assert issubclass(error, base)
    assert str(error("batch 'x' was never submitted")) == "batch 'x' was never submitted"


def test_a_task_with_shards_is_refused(world: World, queue: Queue) -> None:
    shards: dict[str, dict[str, object]] = {"math.1of2": {}, "math.2of2": {}}
    world.start(0, mode="replay", launch_id="one", **shards)
    with pytest.raises(ConfigError, match=r"'math' has shards.*leave tasks\.math\.batches\.shards out"):
        BatchCoordinator(world.buffer, queue).submit("math", "1", PROMPTS, step=1)
