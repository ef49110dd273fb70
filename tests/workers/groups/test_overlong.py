"""Answers that are too long: the soft penalty, the mask, and what the trainer makes of a group that is all masked."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from pydantic import ValidationError

from rollq.buffer.buffer import Buffer
from rollq.buffer.rewards.credit import judged_reward
from rollq.buffer.values.rollouts import FinishReason, Prompt, Sample, Status
from rollq.workers.groups.filters import Filter, keep
from rollq.workers.groups.overlong import length_penalty, mask_truncated, punish
from rollq.workers.groups.task_settings import WorkerTask
from rollq.workers.run import Worker
from rollq.workers.user_code.calls import UserFunction
from support.buffer_run import make_sample
from support.worker_run import Script, WorkerWorld


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (79, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (99, -0.95), (100, -1.0), (200, -1)],
)
def test_the_penalty_grows_through_the_buffer_and_no_further(tokens: int, penalty: float) -> None:
    assert length_penalty(tokens, 100, 20) == pytest.approx(penalty)


def test_without_a_buffer_nothing_up_to_the_limit_is_punished() -> None:
    assert [length_penalty(tokens, 100, 0) for tokens in (1, 100, 101)] == [0.0, 0.0, -1.0]


def test_the_penalty_is_a_part_of_the_reward_and_the_parts_add_up() -> None:
    sample = make_sample(0, reward=1.0, tokens=9)
    punished = punish(sample, 10, 4, 2.0)
    assert punished.reward == pytest.approx(1.0 - 2 * 0.75)
    assert punished.reward_parts == {"judge": 1.0, "overlong": -1.5}
    named = punish(replace(sample, reward_parts={"right": 0.5, "style": 0.5}), 10, 4, 2.0)
    assert sum(named.reward_parts.values()) == pytest.approx(named.reward)
    assert set(named.reward_parts) == {"right", "style", "overlong"}
    unjudged = replace(sample, reward=None)
    assert punish(unjudged, 10, 4, 2.0) is unjudged


def test_only_samples_that_the_limit_ended_are_masked() -> None:
    stopped = make_sample(0)
    assert mask_truncated(stopped) is stopped
    truncated = replace(stopped, finish_reason=FinishReason.LENGTH)
    (segment,) = mask_truncated(truncated).segments
    assert segment.loss_mask is not None
    assert segment.loss_mask.tolist() == [False] * 3
    assert truncated.segments[0].loss_mask is None


def test_a_buffer_larger_than_the_answer_is_refused() -> None:
    with pytest.raises(ValidationError, match="overlong_buffer_tokens = 9: must not exceed max_tokens = 8"):
        WorkerTask(batch_groups=1, max_tokens=8, overlong_buffer_tokens=9)


def test_truncated_samples_are_punished_and_masked_on_their_way_through_a_worker(
    buffer: Buffer, server_url: str
) -> None:
    rules = {"max_tokens": 4, "overlong_buffer_tokens": 2, "overlong_penalty": 0.5, "filters": ["overlong"]}
    world = WorkerWorld(buffer, server_url, rules)
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 1)

    world.play(scene, answer="12345678")
    ((_, samples),) = world.results(1)
    for sample in samples:
        assert sample.finish_reason is FinishReason.LENGTH
        assert sample.reward_parts == {"judge": 0.0, "overlong": -0.5}
        (segment,) = sample.segments
        assert segment.loss_mask is not None
        assert not segment.loss_mask.any()
    world.world.check()


def test_groups_are_filtered_and_passed_by_what_the_judge_said_before_the_penalty() -> None:
    seen: list[list[float | None]] = []

    def watching(prompt: Prompt, samples: Sequence[Sample]) -> bool:
        seen.append([sample.reward for sample in samples])
        return True

    wrong = [punish(make_sample(0, reward=0.0, tokens=length), 100, 20, 2.0) for length in (80, 90, 100)]
    assert [one.reward for one in wrong] == [0.0, -1.0, -2.0]
    assert [judged_reward(one) for one in wrong] == [0.0, 0.0, 0.0]
    custom = Filter("watching", UserFunction.wrap(watching, 60, quick=True))
    zero = Filter.load("zero_advantage", 60)
    assert not asyncio.run(keep([custom, zero], Prompt("?"), wrong))
    assert seen == [[0.0, 0.0, 0.0]]
    right = make_sample(0, reward=1.0, tokens=100)
    assert asyncio.run(keep([zero], Prompt("?"), [*wrong, punish(right, 100, 20, 1.0)]))
