"""Judges that say what tokens and turns earned: their answers, and the array that is made of them."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollq.buffer.values.rollouts import ArrayRef, FinishReason, Prompt, Sample, SampleStatus
from rollq.workers import Credit
from rollq.workers.groups.overlong import punish
from rollq.workers.judging.rewards import Verdict, check_answer
from rollq.workers.judging.token_rewards import check_token_rewards, with_token_rewards
from support.consumer_groups import make_segment
from support.judge_doubles import made

ON, OFF = True, False
SAMPLE = Sample(
    segments=(
        make_segment([1], [2, 3, 4, 5], loss_mask=[ON, ON, OFF, ON]),
        make_segment([1, 2], [6, 7]),
    ),
    status=SampleStatus.COMPLETED,
    finish_reason=FinishReason.STOP,
    reward=1.0,
)
"""Six response tokens in two segments, three turns of the model."""


def rewards_of(answer: Any) -> list[float]:
    found = check_answer(answer, SAMPLE).token_rewards
    assert found is not None
    assert found.dtype == np.float32
    return [float(value) for value in found]


def arrays_of(sample: Sample) -> list[list[float]]:
    return [np.asarray(segment.arrays["token_rewards"]).tolist() for segment in sample.segments]


def test_the_last_token_of_a_turn_gets_its_reward() -> None:
    assert rewards_of(Credit(turns=[1.0, 0.5, -1.0])) == [0, 1, 0, 0.5, 0, -1]


def test_tokens_have_their_rewards_as_they_are() -> None:
    assert rewards_of(Credit(tokens=np.arange(6, dtype=np.float16))) == [0, 1, 2, 3, 4, 5]


def test_the_reward_of_a_sample_is_the_sum_unless_the_judge_names_one() -> None:
    assert check_answer(Credit(turns=[1.0, 0.5, -1.0]), SAMPLE).reward == 0.5
    assert check_answer(Credit(3, turns=[1.0, 0.5, -1.0]), SAMPLE).reward == 3
    named = check_answer(Credit({"right": 1, "short": 0.5}, turns=[0, 0, 0]), SAMPLE)
    assert (named.reward, named.parts) == (1.5, {"right": 1.0, "short": 0.5})
    assert check_answer(0.5, SAMPLE) == Verdict(0.5)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Credit(1.0), "returned Credit without tokens and turns; expected one of the two"),
        (
            Credit(tokens=[0.0] * 6, turns=[0.0] * 3),
            "returned Credit with both tokens and turns; expected one of the two",
        ),
        (Credit(tokens=[0.0] * 5), "returned Credit with 5 tokens for a sample of 6 tokens"),
        (Credit(turns=[0.0] * 2), "returned Credit with 2 turns for a sample of 3 turns"),
        (Credit(turns=[0.0, float("nan"), 0.0]), "returned nan; expected a finite number"),
        (Credit(turns=[0.0, "1st", 0.0]), "returned '1st'; expected a number"),  # type: ignore[list-item]
        (Credit(turns=[0.0, 1e39, 0.0]), r"returned 1e\+39; expected a finite number of 32 bits"),
        (Credit(float("inf"), turns=[0.0] * 3), "returned inf; expected a finite number"),
    ],
)
def test_credit_of_another_length_or_that_is_not_finite_is_refused(answer: Credit, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_answer(answer, SAMPLE)


def test_each_segment_gets_the_rewards_of_its_tokens() -> None:
    written = with_token_rewards(SAMPLE, np.arange(6, dtype=np.float32))
    assert arrays_of(written) == [[0, 1, 2, 3], [4, 5]]
    check_token_rewards(written)
    check_token_rewards(SAMPLE)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([np.zeros(4, np.float32), None], "missing in a segment; all or none have it"),
        ([np.zeros(4, np.float32), np.zeros(3, np.float32)], r"is float32 \[3\]; expected float32 \[2\]"),
        ([np.zeros(4, np.float32), np.zeros(2)], r"is float64 \[2\]; expected float32 \[2\]"),
        ([np.zeros(4, np.float32), np.array([0, np.inf], np.float32)], "has numbers that are not finite"),
    ],
)
def test_an_array_of_an_agent_loop_is_checked(arrays: list[Any], message: str) -> None:
    segments = [
        segment if array is None else replace(segment, arrays={"token_rewards": array})
        for segment, array in zip(SAMPLE.segments, arrays, strict=True)
    ]
    with pytest.raises(ValueError, match=message):
        check_token_rewards(replace(SAMPLE, segments=tuple(segments)))


def test_an_array_in_a_file_is_left_to_the_trainer() -> None:
    stored = {"token_rewards": ArrayRef("file:///x", "0", (1,), "int8")}
    check_token_rewards(replace(SAMPLE, segments=(replace(SAMPLE.segments[0], arrays=stored),)))


def test_a_penalty_for_the_length_is_the_last_tokens_too() -> None:
    written = with_token_rewards(SAMPLE, np.array([0, 1, 0, 0.5, 0, -1], np.float32))
    punished = punish(written, 6, 4, 1.0)
    assert punished.reward == 0.0
    assert arrays_of(punished) == [[0, 1, 0, 0.5], [0, -2]]
    assert punish(SAMPLE, 6, 4, 1.0).segments == SAMPLE.segments


def judged(name: str, options: Mapping[str, Any] | None = None, sample: Sample = SAMPLE, **how: Any) -> Verdict:
    async def scene() -> Verdict:
        async with made(name, options, **how) as judge:
            return await judge.judge(Prompt("?"), sample)

    return asyncio.run(scene())


@pytest.mark.parametrize("isolate", [False, True])
def test_a_judge_returns_credit_also_from_another_process(isolate: bool) -> None:
    found = judged("credit_judge", isolate=isolate)
    assert found.error is None
    assert (found.reward, found.parts) == (2.0, {"right": 2.0})
    assert found.token_rewards is not None
    assert found.token_rewards.tolist() == [0, 1, 0, 0.5, 0, -1]


@pytest.mark.parametrize("isolate", [False, True])
def test_credit_that_does_not_fit_is_an_error_of_the_judge(isolate: bool) -> None:
    found = judged("credit_judge", sample=replace(SAMPLE, segments=SAMPLE.segments[1:]), isolate=isolate)
    assert (found.reward, found.token_rewards) == (None, None)
    assert found.error is not None
    assert found.error.endswith("ValueError: returned Credit with 3 turns for a sample of 1 turns")


def test_parts_add_up_their_credit_and_those_without_give_theirs_to_the_last_token() -> None:
    parts = {
        "turns": {"judge": "support.judge_doubles.credit_judge", "weight": 2},
        "plain": {"judge": "support.judge_doubles.two_parts"},
    }
    found = judged("weighted", {"parts": parts})
    assert found.parts == {"turns/right": 4.0, "plain/one": 1.0, "plain/other": -0.5}
    assert found.token_rewards is not None
    assert found.token_rewards.tolist() == [0, 2, 0, 1, 0, -1.5]


@pytest.mark.parametrize(("options", "expected"), [({}, None), ({"turn_rewards": True}, [0, 0.5, 0, 0, 0, 1])])
def test_the_rewards_of_an_environments_steps_are_given_to_turns_when_asked_for(
    options: Mapping[str, Any], expected: list[float] | None
) -> None:
    sample = replace(SAMPLE, extra={"environment_reward": 1.5, "turn_rewards": [0.5, 0.0, 1.0]})
    found = judged("environment", options, sample)
    assert found.reward == 1.5
    assert (None if found.token_rewards is None else found.token_rewards.tolist()) == expected


@pytest.mark.parametrize("reward", [None, True, "1.5", float("nan"), [1.0]])
def test_the_sum_of_an_environment_is_a_finite_number_or_there_is_no_reward(reward: object) -> None:
    found = judged("environment", {}, replace(SAMPLE, extra={"environment_reward": reward}))
    assert found.reward is None
    assert found.error is not None
    turns = {"environment_reward": 1.5, "turn_rewards": [0.5, 1.0, reward]}
    assert judged("environment", {"turn_rewards": True}, replace(SAMPLE, extra=turns)).reward is None


def test_an_environment_without_rewards_of_turns_is_an_error() -> None:
    found = judged("environment", {"turn_rewards": True}, replace(SAMPLE, extra={"environment_reward": 1.5}))
    assert found.error is not None
    assert "without tokens and turns" in found.error
