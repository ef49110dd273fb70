"""Groups of a batch that is cut off, on their way through a real worker."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import GroupResult, Prompt, Sample, SampleStatus, Status
from rollq.producer.batches import BatchResult, OverRollout
from rollq.producer.coordinator import BatchCoordinator
from rollq.workers.groups.cut_off import without_the_rest
from rollq.workers.groups.filters import is_enough
from rollq.workers.run import Worker
from support.buffer_run import make_sample
from support.slow_engine import pass_time
from support.waiting import PATIENCE_S
from support.worker_run import Script, WorkerWorld


@pytest.mark.parametrize(("letters", "min_valid", "enough"), [("cca", 2, True), ("cfa", 2, False), ("aaa", 1, False)])
def test_a_group_is_enough_by_its_completed_samples(letters: str, min_valid: int, enough: bool) -> None:
    assert is_enough([make_sample(0, status=letter) for letter in letters], min_valid) is enough


def test_the_rest_of_a_group_are_failed_samples_without_tokens() -> None:
    made, failed, cut = without_the_rest([make_sample(0, status=letter) for letter in "cfa"])
    assert (made.status, failed.status, cut.status) == tuple(map(SampleStatus, "cff"))
    assert (made.response_tokens, cut.response_tokens, cut.error) == (3, 0, "its batch was cut off")
    assert (failed.failure, cut.failure) == (FailureKind.GRADER, None)  # nothing has failed


async def takes_a_while(prompt: Prompt, samples: Sequence[Sample]) -> bool:
    """A filter that asks, say, a model."""
    await asyncio.sleep(1.5)
    return True


PROMPTS = [Prompt("one", answer="1"), Prompt("two", answer="2")]
RULES = {"group_size": 3, "min_valid_samples": 2, "partial_rollout": True}
CUT = OverRollout(ratio=0.9, grace_s=0.0, partial_groups=True)
ENGINE = "support.slow_engine.SlowEngine"


async def takes_a_while_for_two(prompt: Prompt, samples: Sequence[Sample]) -> bool:
    return prompt.content == "one" or await takes_a_while(prompt, samples)


def finalize_when(world: WorkerWorld, *, running: int, lengths: list[int]) -> tuple[BatchResult, int]:
    """Finalize a batch of two groups once one is gathered and so many samples are running; returns the result, and how
    many samples the worker counted as failed."""
    coordinator = BatchCoordinator(world.buffer, world.queue, over_rollout=CUT)
    seen: list[tuple[BatchResult, int]] = []

    async def scene(worker: Worker, script: Script) -> None:
        batch = coordinator.submit("math", "1", PROMPTS, step=1)
        await world.until(lambda: script.running == 6)
        pass_time(10)
        await world.until(lambda: script.running == running and world.count(Status.GATHERED) == 1)
        result = await asyncio.to_thread(coordinator.finalize, "math", batch, timeout_s=PATIENCE_S)
        await world.until(lambda: script.running == 0)
        seen.append((result, worker.runner.totals.failed_samples))

    world.play(scene, engine=ENGINE, lengths=lengths)
    world.world.check()
    return seen[0]


@pytest.mark.parametrize(
    ("rules", "completed"),
    [({}, 2), ({"min_valid_samples": 3}, 1), ({"filters": [f"{__name__}.takes_a_while"]}, 2)],
    ids=["enough", "all are needed", "with a slow filter"],
)
def test_a_worker_ends_a_group_whose_batch_is_cut_off(
    buffer: Buffer, server_url: str, rules: dict[str, Any], completed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of its second group, two samples of three are finished. What is cut off has not failed."""
    world = WorkerWorld(buffer, server_url, RULES | rules)
    result, failed_samples = finalize_when(world, running=1, lengths=[4, 4, 4, 4, 4, 10_000])
    assert (world.count(Status.COMPLETED), result.finished_task_count) == (completed, completed)
    assert failed_samples == 0
    assert "no reward" not in caplog.text


def test_a_group_that_is_whole_is_filtered_in_peace(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, RULES | {"filters": [f"{__name__}.takes_a_while_for_two"]})
    result, _ = finalize_when(world, running=0, lengths=[4])
    assert result.finished_task_count == 2
    assert buffer.inspect("math", 2)["letters"] == "ccc"


def test_a_group_that_waits_with_enough_samples_is_put_by_whoever_leases_it(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, RULES)
    coordinator = BatchCoordinator(buffer, world.queue, over_rollout=CUT)
    batch = coordinator.submit("math", "1", PROMPTS, step=1)
    whole, interrupted = world.world.lease(2)
    made = make_sample(0)
    results = [GroupResult(whole, (made,) * 3), GroupResult(interrupted, (made, made, make_sample(0, status="a")))]
    assert buffer.put(results) == [PutOutcome.GATHERED, PutOutcome.RESTARTED]
    assert buffer.cut_off("math", batch.handle) == 1
    found: list[BatchResult] = []

    async def scene(worker: Worker, script: Script) -> None:
        found.append(await asyncio.to_thread(coordinator.finalize, "math", batch, timeout_s=PATIENCE_S))

    world.play(scene, engine=ENGINE, lengths=[10_000])
    assert found[0].finished_task_count == 2
    assert buffer.inspect("math", interrupted.group_id)["letters"] == "ccf"
