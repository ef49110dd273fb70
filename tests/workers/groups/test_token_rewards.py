"""What tokens earned, on its way through a worker to the trainer."""

from typing import Any

import numpy as np
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.values.rollouts import Prompt, Sample, Status
from rollq.workers import Credit
from rollq.workers.agents.loops import Rollout, SingleTurn
from rollq.workers.judging.token_rewards import with_token_rewards
from rollq.workers.run import Worker
from support.worker_run import Script, WorkerWorld


def even_judge(prompt: Prompt, sample: Sample) -> Credit:
    """1 for each token that is even."""
    return Credit(tokens=[float(id % 2 == 0) for segment in sample.segments for id in segment.response_ids])


class Counting(SingleTurn):
    """Gives tokens the rewards 0, 1, ...; without `finite`, the last one is not a number."""

    def __init__(self, *, finite: bool = True) -> None:
        self._finite = finite

    async def run(self, rollout: Rollout) -> Sample:
        sample = await super().run(rollout)
        rewards = np.arange(sample.response_tokens, dtype=np.float32)
        rewards[-1] = rewards[-1] if self._finite else np.nan
        return with_token_rewards(sample, rewards)


def only_group(world: WorkerWorld, status: Status) -> list[Sample]:
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(status, 1)

    world.play(scene, answer="1234")
    return list(world.results(1)[0][1]) if status is Status.COMPLETED else []


@pytest.mark.parametrize(
    ("rules", "reward", "expected"),
    [
        ({"judge": f"{__name__}.even_judge"}, 2.0, [0, 1, 0, 1, 0]),
        ({"judge": f"{__name__}.even_judge", "agent_loop": f"{__name__}.Counting"}, 2.0, [0, 1, 0, 1, 0]),
        ({"judge": "exact_match", "agent_loop": f"{__name__}.Counting"}, 0.0, [0, 1, 2, 3, 4]),
    ],
    ids=["judge", "both", "loop"],
)
def test_rewards_of_tokens_reach_the_trainer_from_the_judge_or_else_the_loop(
    buffer: Buffer, server_url: str, rules: dict[str, object], reward: float, expected: list[float]
) -> None:
    for sample in only_group(WorkerWorld(buffer, server_url, rules), Status.COMPLETED):
        found = sample.segments[0].arrays["token_rewards"]
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.float32
        assert found.tolist() == expected
        assert sample.reward == reward


def test_rewards_of_a_loop_that_are_not_finite_fail_their_samples(buffer: Buffer, server_url: str) -> None:
    loop = {"agent_loop": f"{__name__}.Counting", "agent_options": {"finite": False}, "max_tries": 1}
    world = WorkerWorld(buffer, server_url, loop)
    only_group(world, Status.FAILED)
    assert "agent loop: array 'token_rewards' has numbers that are not finite" in world.error(1)


def test_an_evaluation_has_no_rewards_of_tokens(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, {"judge": f"{__name__}.even_judge"})
    held_out = world.task.model_copy(update={"kind": "eval"})
    world.tasks["held_out"] = held_out
    buffer.register_task("held_out", held_out)
    state = buffer.open_batch("held_out", "0/held_out", "eval", step=0)
    buffer.fill_batch("held_out", state.handle, 0, [Prompt("question", answer="?")], last=True)

    async def scene(worker: Worker, script: Script) -> None:
        world.tickets(1)
        await world.until(lambda: buffer.batch_by_handle("held_out", state.handle).gathered == 1)

    world.play(scene, answer="1234")
    client: Any = buffer.client
    hashes = client.scan_iter(f"*{buffer.run}:held_out*", _type="hash")
    stored = b"".join(value for key in hashes for value in client.hgetall(key).values())
    assert b"even_judge" in stored
    assert b"token_rewards" not in stored
