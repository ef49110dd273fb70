"""Rewards stay with their samples, and rewards of turns with their turns, in any order of events."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.rewards.credit import TOKEN_REWARDS
from rollq.buffer.values.rollouts import Prompt, Sample, SampleStatus, Status
from rollq.workers import Credit
from rollq.workers.run import Worker
from support.worker_run import Script, WorkerWorld

from .test_fleet import play
from .test_group_judging import forgotten  # noqa: F401 - a fixture for every test
from .test_lending import taken

SIZE, BROKEN = 8, (2, 5)
WHOLE = [index for index in range(SIZE) if index not in BROKEN]
JUDGED: list[int] = []


async def backwards(prompt: Prompt, sample: Sample) -> Credit:
    """What the text says, for the only turn. The last sample is judged first."""
    index = int(sample.text)
    while not set(WHOLE[WHOLE.index(index) + 1 :]) <= set(JUDGED):
        await asyncio.sleep(0.005)
    JUDGED.append(index)
    return Credit({"text": float(index)}, turns=[float(index)])


async def tenfold(prompt: Prompt, samples: Sequence[Sample]) -> list[Credit | None]:
    """Ten times the reward; nothing for the fourth sample."""
    given = [10 * (sample.reward or 0.0) for sample in samples]
    return [None if reward == 30 else Credit({"ten": reward}, turns=[reward]) for reward in given]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("group_judge", [None, f"{__name__}.tenfold"])
def test_each_sample_has_its_own_reward_though_they_are_judged_backwards_lent_and_broken(
    buffer: Buffer, server_url: str, workers: int, group_judge: str | None
) -> None:
    JUDGED.clear()
    rules = {
        "group_size": SIZE, "min_valid_samples": 5, "max_tokens": 2000, "partial_rollout": True,
        "judge": f"{__name__}.backwards", "group_judge": group_judge,
        "agent_loop": "tests.workers.groups.test_group_judging.Numbered", "agent_options": {"broken": BROKEN},
    }  # fmt: skip
    world = WorkerWorld(buffer, server_url, rules)

    async def scene(world: WorkerWorld, running: Sequence[Worker], script: Script) -> None:
        world.admit(1)
        await world.until(lambda: sum(taken(running)) == SIZE)
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)

    play(world, scene, *[{"samples_in_flight": SIZE // workers}] * workers)
    ((_, samples),) = world.results(1)
    assert sorted(JUDGED, reverse=True) == JUDGED == WHOLE[::-1]
    factor, failed = (1, BROKEN) if group_judge is None else (10, (*BROKEN, 3))
    for index, sample in enumerate(samples):
        if index in failed:
            assert (sample.status, sample.reward, sample.reward_parts) == (SampleStatus.FAILED, None, {})
            continue
        assert (sample.text, sample.reward) == (str(index), float(factor * index))
        (segment,) = sample.segments
        rewards = segment.arrays[TOKEN_REWARDS]
        assert isinstance(rewards, np.ndarray)
        assert rewards.tolist() == [0.0, 0.0, float(factor * index)]
    mean = sum(factor * index for index in range(SIZE) if index not in failed) / (SIZE - len(failed))
    assert float(buffer.inspect("math", 1)["reward"]) == pytest.approx(mean), "of those that have one"
    world.world.check()
