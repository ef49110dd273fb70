"""The experience pipeline: pure functions on scored groups."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import Group, Prompt, Sample, SampleStatus
from rollq.producer.pipeline import (
    Operator,
    ScoredGroup,
    clip_rewards,
    drop_zero_advantage,
    group_normalised,
    leave_one_out,
    reinforce_plus_plus,
    run_pipeline,
)
from support.buffer_run import make_sample

FAILED = Sample(segments=(), status=SampleStatus.FAILED, failure=FailureKind.GRADER, error="no")


def piped(operators: Sequence[Operator], groups: Sequence[Group]) -> list[ScoredGroup]:
    return run_pipeline(operators, groups)[0]


def group(group_id: int, *rewards: float | None) -> Group:
    samples = tuple(FAILED if reward is None else make_sample(0, reward=reward) for reward in rewards)
    return Group("math", group_id, Prompt("?"), samples, 0, group_id, 1)


def given(scored: Sequence[ScoredGroup]) -> list[list[float]]:
    return [[round(float(a), 3) for a in one.advantages] for one in scored if one.advantages is not None]


def test_groups_that_teach_nothing_are_dropped_with_the_reason() -> None:
    scored, _ = run_pipeline([drop_zero_advantage], [group(1, 1.0, 1.0), group(2, 0.0, 1.0), group(3, 0.5, None)])
    assert [one.dropped for one in scored] == ["all rewards are equal", None, "all rewards are equal"]


def test_an_operator_does_not_see_what_an_earlier_one_has_dropped() -> None:
    seen: list[int] = []

    def look(groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        seen.extend(one.group.group_id for one in groups)
        return groups

    scored, _ = run_pipeline([drop_zero_advantage, look], [group(1, 1.0, 1.0), group(2, 0.0, 1.0)])
    assert seen == [2]
    assert [one.group.group_id for one in scored] == [1, 2]


def test_rewards_are_clipped() -> None:
    (one,), _ = run_pipeline([clip_rewards(-0.5, 0.5)], [group(1, -2.0, 0.25, 3.0)])
    assert one.rewards.tolist() == [-0.5, 0.25, 0.5]
    assert one.group.samples[0].reward == -2.0, "the group itself stays as it is"


def test_bounds_that_are_swapped_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"clip_rewards\(1, 0\)"):
        clip_rewards(1, 0)


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        pytest.param(group_normalised, [[-1.0, 1.0, 0.0], [1.0, -1.0, 0.0]], id="GRPO"),
        pytest.param(leave_one_out, [[-1.0, 1.0, 0.0], [3.0, -3.0, 0.0]], id="RLOO"),
        # mean 1, deviation sqrt(1.5) over the four valid samples 0, 1, 3, 0
        pytest.param(reinforce_plus_plus, [[-0.816, 0.0, 0.0], [1.633, -0.816, 0.0]], id="REINFORCE++"),
    ],
)
def test_advantages(operator: Operator, expected: list[list[float]]) -> None:
    assert given(piped([operator], [group(1, 0.0, 1.0, None), group(2, 3.0, 0.0, None)])) == expected


def test_rewards_of_other_tasks_are_not_compared() -> None:
    mine, other = group(1, 0.0, 1.0), replace(group(2, 10.0, 30.0), task="other")
    assert given(piped([reinforce_plus_plus], [mine, other])) == [[-1.0, 1.0], [-1.0, 1.0]]


def test_a_pipeline_of_nothing_leaves_the_judges_rewards() -> None:
    (one,), _ = run_pipeline([], [group(1, 0.5, None)])
    assert (one.rewards.tolist(), one.valid.tolist(), one.advantages, one.dropped) == (
        [0.5, 0.0],
        [True, False],
        None,
        None,
    )


def test_an_empty_batch_is_allowed() -> None:
    assert run_pipeline([drop_zero_advantage, group_normalised], []) == ([], {})


def test_numbers_that_operators_return_are_kept_by_name() -> None:
    def counts(groups: Sequence[ScoredGroup]) -> tuple[Sequence[ScoredGroup], dict[str, float]]:
        return groups, {"seen": len(groups), "last": 1}

    def counts_more(groups: Sequence[ScoredGroup]) -> tuple[Sequence[ScoredGroup], dict[str, float]]:
        return groups, {"last": 2.5}

    scored, metrics = run_pipeline([counts, drop_zero_advantage, counts_more], [group(1, 0.0, 1.0), group(2, 1.0, 1.0)])
    assert len(scored) == 2
    assert metrics == {"seen": 2.0, "last": 2.5}


def blurs(groups: Sequence[ScoredGroup]) -> tuple[Sequence[ScoredGroup], dict[str, float]]:
    return groups, {"entropy": float("nan")}


def loses(groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
    return groups[1:]


def misshapes(groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
    return [replace(one, advantages=np.zeros(7, np.float32)) for one in groups]


def spoils(groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
    return [replace(one, rewards=np.full_like(one.rewards, np.nan)) for one in groups]


def leaves_out(groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
    return [replace(one, valid=np.array([True, False])) for one in groups]


def leaves_out_in_place(groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
    for one in groups:
        one.valid[0] = False
    return groups


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (leaves_out, "'leaves_out': group 1: must not change `valid`, .* or drop the group"),
        (leaves_out_in_place, "'leaves_out_in_place': group 1: must not change `valid`"),
        (loses, "'loses': must return the 2 groups"),
        (misshapes, "'misshapes': group 1 needs 2 finite advantages"),
        (blurs, "'blurs': returned {'entropy': nan} as metrics; finite numbers are needed"),
        (spoils, "'spoils': group 1 needs 2 finite rewards"),
    ],
)
def test_an_operator_that_breaks_the_rules_is_named(operator: Operator, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_pipeline([operator], [group(1, 0.0, 1.0), group(2, 0.0, 1.0)])
