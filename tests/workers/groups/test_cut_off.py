"""Groups of a batch that is cut off, on their way through a real worker."""

import asyncio

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.rollouts import Prompt, SampleStatus, Status
from rollq.producer.batches import BatchResult, OverRollout
from rollq.producer.coordinator import BatchCoordinator
from rollq.workers.groups.cut_off import is_enough, without_the_rest
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


@pytest.mark.parametrize(("min_valid", "completed", "aborted"), [(2, 2, 0), (3, 1, 1)], ids=["enough", "too few"])
def test_a_worker_ends_a_group_whose_batch_is_cut_off(
    buffer: Buffer, server_url: str, min_valid: int, completed: int, aborted: int
) -> None:
    """Of its second group, two samples of three are finished."""
    world = WorkerWorld(buffer, server_url, {"group_size": 3, "min_valid_samples": min_valid, "partial_rollout": True})
    over_rollout = OverRollout(ratio=0.9, grace_s=0.0, partial_groups=True)
    coordinator = BatchCoordinator(buffer, world.queue, over_rollout=over_rollout)
    prompts = [Prompt("one", answer="1"), Prompt("two", answer="2")]
    results: list[BatchResult] = []

    async def scene(worker: Worker, script: Script) -> None:
        batch = coordinator.submit("math", "1", prompts, step=1)
        await world.until(lambda: script.running == 6)
        pass_time(10)
        await world.until(lambda: script.running == 1 and world.count(Status.GATHERED) == 1)
        results.append(await asyncio.to_thread(coordinator.finalize, "math", batch, timeout_s=PATIENCE_S))
        await world.until(lambda: script.running == 0)

    world.play(scene, engine="support.slow_engine.SlowEngine", lengths=[4, 4, 4, 4, 4, 10_000])
    world.world.check()
    assert (world.count(Status.COMPLETED), world.count(Status.ABORTED)) == (completed, aborted)
    assert results[0].finished_task_count == completed
