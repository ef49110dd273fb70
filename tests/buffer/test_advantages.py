"""Advantages against the formulas, worked by hand."""

from itertools import combinations

import numpy as np
import pytest
from pydantic import ValidationError

from rollq.buffer.rewards.advantages import AdvantageSettings, advantages, no_advantage

REWARDS = [1.0, 0.0, 0.0, 0.0, 2.0, 4.0]
GROUPS = [0, 0, 0, 0, 1, 1]
ALL = [True] * 6


def test_grpo_subtracts_the_group_mean_and_divides_by_its_deviation() -> None:
    got = advantages(REWARDS, GROUPS, ALL, AdvantageSettings())
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [3**0.5, *[-(3**-0.5)] * 3, -1, 1], rtol=1e-5)


def test_the_deviation_of_a_sample_divides_by_one_less() -> None:
    sample = AdvantageSettings(deviation="sample")
    torch_std = np.array([np.std(REWARDS[:4], ddof=1)] * 4 + [np.std(REWARDS[4:], ddof=1)] * 2)
    centred = np.array([0.75, -0.25, -0.25, -0.25, -1, 1])
    np.testing.assert_allclose(advantages(REWARDS, GROUPS, ALL, sample), centred / torch_std, rtol=1e-5)
    valid = [True, True, False, True, True, False]
    got = advantages(REWARDS, GROUPS, valid, sample)
    third = float(np.std([1.0, 0.0, 0.0], ddof=1))
    np.testing.assert_allclose(got, [2 / 3 / third, -1 / 3 / third, 0, -1 / 3 / third, 0, 0], rtol=1e-5)


def test_the_deviation_of_a_batch_divides_by_one_less_too() -> None:
    settings = AdvantageSettings(baseline="batch", scale="batch", deviation="sample")
    rewards = np.array(REWARDS)
    expected = (rewards - rewards.mean()) / rewards.std(ddof=1)
    np.testing.assert_allclose(advantages(REWARDS, GROUPS, ALL, settings), expected, rtol=1e-5)


def test_without_scale_the_advantage_is_the_distance_from_the_group_mean() -> None:
    got = advantages(REWARDS, GROUPS, ALL, AdvantageSettings(scale="none"))
    np.testing.assert_allclose(got, [0.75, -0.25, -0.25, -0.25, -1, 1], rtol=1e-6)


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    got = advantages(REWARDS, GROUPS, ALL, AdvantageSettings(baseline="leave_one_out", scale="none"))
    np.testing.assert_allclose(got, [1, -1 / 3, -1 / 3, -1 / 3, -2, 2], rtol=1e-6)


def test_opo_weighs_the_mean_of_the_group_by_length() -> None:
    settings = AdvantageSettings(baseline="opo", scale="none")
    got = advantages([1.0, 0.0, 9.0, 2.0, 4.0], [0, 0, 0, 1, 1], [1, 1, 0, 1, 1], settings, lengths=[30, 10, 5, 1, 3])
    np.testing.assert_allclose(got, [0.25, -0.75, 0, -1.5, 0.5], rtol=1e-6)  # baselines 30 / 40 and (2 + 12) / 4
    assert advantages([1.0, 0.0], [0, 0], [True] * 2, settings, lengths=[0, 0]).tolist() == [1.0, 0.0]
    np.testing.assert_allclose(advantages([1.0, 0.0], [0, 0], [True] * 2, settings), [0.5, -0.5])


def test_pass_at_k_has_the_published_closed_form() -> None:
    # n = 4, m = 2, k = 2: R = 1 - 1 / 6; a sample that failed is in three draws, of which one fails: 1 - 1 / 3
    rewards, groups = [1.0, 0.0, -1.0, 0.5, 7.0], [0, 0, 0, 0, 0]
    valid = [True, True, True, True, False]
    plain = advantages(rewards, groups, valid, AdvantageSettings(pass_k=2, scale="none"))
    np.testing.assert_allclose(plain, [1 / 6, -1 / 6, -1 / 6, 1 / 6, 0], rtol=1e-6)
    scaled = advantages(rewards, groups, valid, AdvantageSettings(pass_k=2))
    np.testing.assert_allclose(scaled, plain / (5 / 36) ** 0.5, rtol=1e-5)


@pytest.mark.parametrize("solved", range(8))
def test_pass_at_k_is_the_mean_over_all_draws(solved: int) -> None:
    n, k = 7, 3
    rewards = [1.0] * solved + [0.0] * (n - solved)
    draws = list(combinations(range(n), k))
    earned = np.array([max(rewards[i] for i in draw) for draw in draws])
    expected = [
        np.mean([one for one, draw in zip(earned, draws, strict=True) if i in draw]) - earned.mean() for i in range(n)
    ]
    settings = AdvantageSettings(pass_k=k)
    got = advantages([0.0, 1.0, *rewards], [1, 1] + [0] * n, [True] * (n + 2), settings)
    assert got[:2].tolist() == [0.0, 0.0]  # fewer than k
    np.testing.assert_allclose(got[2:], np.array(expected) / (earned.std() + settings.eps), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "other", [{"baseline": "opo"}, {"baseline": "leave_one_out"}, {"deviation": "sample"}, {"scale": "batch"}], ids=str
)
def test_pass_at_k_refuses_what_it_would_not_use(other: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="pass_k = 2: "):
        AdvantageSettings.model_validate({"pass_k": 2, **other})


def test_batch_baseline_and_scale_ignore_the_groups() -> None:
    got = advantages(REWARDS, GROUPS, ALL, AdvantageSettings(baseline="batch", scale="batch"))
    rewards = np.array(REWARDS)
    np.testing.assert_allclose(got, (rewards - rewards.mean()) / rewards.std(), rtol=1e-5)


@pytest.mark.parametrize(("baseline", "scale"), [("batch", "batch"), ("batch", "none"), ("group", "batch")])
def test_the_batch_of_a_task_is_not_measured_by_that_of_another(baseline: str, scale: str) -> None:
    settings = AdvantageSettings.model_validate({"baseline": baseline, "scale": scale})
    rewards, groups, tasks = [0.0, 1.0, 0.0, 0.0, 70.0, 30.0], [0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1]
    got = advantages(rewards, groups, ALL, settings, tasks=tasks)
    np.testing.assert_allclose(got[:4], advantages(rewards[:4], groups[:4], ALL[:4], settings), rtol=1e-6)
    np.testing.assert_allclose(got[4:], advantages(rewards[4:], [0, 0], ALL[4:], settings), rtol=1e-6)


def test_a_group_without_deviation_is_not_measured_from_the_mean_of_the_batch() -> None:
    with pytest.raises(ValueError, match='use scale = "batch" or "none"'):
        AdvantageSettings(baseline="batch", scale="group")


@pytest.mark.parametrize(
    ("baseline", "scale"),
    [
        (b, s)
        for b in ("group", "leave_one_out", "batch")
        for s in ("none", "group", "batch")
        if (b, s) != ("batch", "group")
    ],
)
def test_a_failed_sample_gets_zero_and_does_not_move_the_others(baseline: str, scale: str) -> None:
    settings = AdvantageSettings.model_validate({"baseline": baseline, "scale": scale})
    without = advantages([1.0, 0.0, 5.0, 2.0], [0, 0, 1, 1], [True] * 4, settings)
    with_failed = advantages([1.0, 99.0, 0.0, 5.0, 2.0], [0, 0, 0, 1, 1], [True, False, True, True, True], settings)
    assert with_failed[1] == 0
    np.testing.assert_allclose(with_failed[[0, 2, 3, 4]], without)


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_a_group_of_one_valid_sample_teaches_nothing(baseline: str) -> None:
    settings = AdvantageSettings.model_validate({"baseline": baseline})
    assert advantages([3.0, 1.0], [0, 0], [True, False], settings).tolist() == [0.0, 0.0]


def test_equal_rewards_give_zero_and_nothing_valid_gives_zeros() -> None:
    assert advantages([2.0] * 3, [0] * 3, [True] * 3, AdvantageSettings()).tolist() == [0.0] * 3
    assert advantages([np.nan] * 2, [0] * 2, [False] * 2, AdvantageSettings()).tolist() == [0.0] * 2


@pytest.mark.parametrize(
    ("rewards", "none"),
    [
        ([], True),
        ([0.5], True),
        ([1.0, 1.0], True),
        ([0.3, 0.1 + 0.2], True),
        ([0.5, 0.5 + 5e-7], True),
        ([0.5, 0.51], False),
    ],
)
def test_a_group_without_advantage_is_one_whose_rewards_are_the_same_but_for_rounding(
    rewards: list[float], none: bool
) -> None:
    assert no_advantage(rewards) is none
