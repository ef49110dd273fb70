"""Metrics of evaluations: what k samples would have had, by data source, and a user's own."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollq.buffer.calls.evaluation_metrics import MOST_SOURCES, evaluation_metrics
from rollq.buffer.calls.evaluations import EvaluatedGroup
from rollq.buffer.errors import ConfigError
from rollq.buffer.rewards.at_k import best_at_k, pass_at_k, sizes, worst_at_k


def group(*rewards: float, source: str | None = None) -> EvaluatedGroup:
    mean = sum(rewards) / len(rewards)
    return EvaluatedGroup(mean, len(rewards), len(rewards), failed=False, rewards=rewards, source=source)


@given(rewards=st.lists(st.integers(-3, 3), min_size=1, max_size=7), data=st.data())
def test_estimates_are_means_over_all_choices_of_k_samples(rewards: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    choices = list(itertools.combinations(rewards, k))
    assert best_at_k(rewards, k) == pytest.approx(sum(map(max, choices)) / len(choices))
    assert worst_at_k(rewards, k) == pytest.approx(sum(map(min, choices)) / len(choices))
    passed = sum(reward > 0 for reward in rewards)
    assert pass_at_k(len(rewards), passed, k) == pytest.approx(
        sum(max(choice) > 0 for choice in choices) / len(choices)
    )


def test_of_many_samples_too() -> None:
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)
    assert best_at_k([0.0] * 9_999 + [1.0], 5_000) == pytest.approx(0.5)


@pytest.mark.parametrize("k", [0, 3])
def test_k_is_from_1_to_the_number_of_samples(k: int) -> None:
    with pytest.raises(ValueError, match=f"k = {k} of 2 samples"):
        pass_at_k(2, 1, k)
    with pytest.raises(ValueError, match=f"k = {k} of 2 samples"):
        best_at_k([0.0, 1.0], k)


def test_powers_of_two_are_reported_and_all_samples() -> None:
    assert [list(sizes(n)) for n in (0, 1, 2, 5, 8)] == [[], [1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_prompts_with_fewer_samples_are_left_out_of_larger_k() -> None:
    metrics = evaluation_metrics("x", [group(0.0, 0.2, 0.6, 1.0), group(1.0, 0.0)], detailed=True)
    at = {key.removeprefix("eval/x/"): value for key, value in metrics.items() if "@" in key}
    assert at == pytest.approx(
        {
            "pass@1": 0.5, "pass@2": (5 / 6 + 1) / 2, "pass@4": 1.0, "best@2": ((3 * 1.0 + 2 * 0.6 + 0.2) / 6 + 1) / 2,
            "best@4": 1.0, "worst@2": (3 * 0.0 + 2 * 0.2 + 0.6) / 6 / 2, "worst@4": 0.0,
        }
    )  # fmt: skip


def test_a_sample_passes_with_the_tasks_reward() -> None:
    metrics = evaluation_metrics("x", [group(0.2, 0.4)], detailed=True, pass_reward=0.4)
    assert metrics["eval/x/pass@1"] == 0.5


def test_groups_of_one_have_no_metrics_at_k() -> None:
    assert not any("@" in key for key in evaluation_metrics("x", [group(1.0)], detailed=True))


def test_prompts_of_each_data_source_are_measured_by_themselves() -> None:
    groups = [group(1.0, source="math"), group(0.0, source="code"), group(0.5, source="code")]
    groups.append(EvaluatedGroup(None, 0, 0, failed=True, source="code"))
    metrics = evaluation_metrics("x", groups, detailed=True)
    assert metrics["eval/x/reward"] == 0.5
    assert metrics["eval/x/source/math/reward"] == 1.0
    assert metrics["eval/x/source/code/reward"] == 0.25
    assert metrics["eval/x/source/code/failed"] == 1
    assert not any("source" in key for key in evaluation_metrics("x", groups))


@pytest.mark.parametrize("count", [1, MOST_SOURCES + 1])
def test_one_source_or_too_many_have_no_metrics_of_their_own(count: int, caplog: pytest.LogCaptureFixture) -> None:
    groups = [group(1.0, source=f"s{number}") for number in range(count)]
    assert not any("source" in key for key in evaluation_metrics("x", groups, detailed=True))
    assert ("33 data sources, so their metrics are left out" in caplog.text) is (count > 1)


def test_a_function_adds_metrics() -> None:
    def lengths(name: str, groups: Sequence[EvaluatedGroup]) -> Mapping[str, float]:
        return {f"longest_of_{name}": max(group.tokens for group in groups)}

    metrics = evaluation_metrics("x", [group(1.0, 0.0), group(1.0)], function=lengths)
    assert metrics["eval/x/longest_of_x"] == 2.0


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned None; expected a dict"),
        ({"a": "b"}, "returned 'a': 'b'; expected numbers"),
        ({1: 2}, "1: 2"),
    ],
)
def test_a_function_that_returns_anything_but_numbers_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluation_metrics("x", [group(1.0)], function=lambda name, groups: returned)
