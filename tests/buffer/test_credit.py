"""Credit: steps of a sample, and the advantages of their tokens."""

import numpy as np
import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.rewards.advantages import AdvantageSettings, advantages
from rollq.buffer.rewards.credit import last_tokens, steps_of, token_advantages
from support.consumer_groups import make_segment

GRPO = AdvantageSettings()
CENTRED = AdvantageSettings(scale="none")
RLOO = AdvantageSettings(baseline="leave_one_out", scale="none")

ON, OFF = True, False
TURNS = [
    make_segment([1], [2, 3, 4, 5, 6], loss_mask=[ON, ON, OFF, ON, OFF]),
    make_segment([1, 2, 3], [7, 8, 9], loss_mask=[OFF, ON, ON]),
]
"""Three turns of the model in two segments, with tokens of the environment after each of the first two, and before the
last one."""


def test_a_turn_is_a_run_of_the_models_tokens_with_what_the_environment_wrote_after_it() -> None:
    assert steps_of(TURNS, "turns").tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert last_tokens(TURNS, "turns").tolist() == [1, 3, 7]


def test_every_token_of_the_model_is_a_step() -> None:
    assert steps_of(TURNS, "tokens").tolist() == [0, 1, 1, 2, 2, 2, 3, 4]
    assert last_tokens(TURNS, "tokens").tolist() == [0, 1, 3, 6, 7]


def test_a_segment_begins_a_turn() -> None:
    assert steps_of([make_segment([1], [2, 3]), make_segment([1], [4])], "turns").tolist() == [0, 0, 1]


def test_a_sample_without_a_loss_counts_as_the_models() -> None:
    masked = [make_segment([1], [2, 3], loss_mask=[OFF, OFF])]
    assert steps_of(masked, "turns").tolist() == [0, 0]
    assert last_tokens(masked, "turns").tolist() == [1]
    assert steps_of(masked, "tokens").tolist() == [0, 1]


def test_a_sample_without_tokens_has_no_steps() -> None:
    assert steps_of([], "turns").tolist() == last_tokens([], "turns").tolist() == []


@pytest.mark.parametrize("settings", [AdvantageSettings(baseline="opo"), AdvantageSettings(pass_k=2)], ids=str)
def test_baselines_of_whole_samples_are_refused(settings: AdvantageSettings) -> None:
    with pytest.raises(ConfigError, match="compare whole samples"):
        token_advantages([[1.0], [0.0]], [[0], [0]], [0, 0], settings)


def test_a_step_gets_what_follows_it_less_the_mean_of_the_group() -> None:
    # returns 3, 2 and 1; the means of the samples are 2.5 and 1, that of the group is 1.75
    found = token_advantages([[1.0, 2.0], [1.0]], [[0, 1], [0]], [0, 0], CENTRED)
    assert [one.tolist() for one in found] == [[1.25, 0.25], [-0.75]]
    assert all(one.dtype == np.float32 for one in found)


def test_tokens_of_a_step_share_its_reward_and_its_advantage() -> None:
    found = token_advantages([[0.5, 0.5, 0.0, 2.0], [1.0]], [[0, 0, 1, 1], [0]], [0, 0], CENTRED)
    assert [one.tolist() for one in found] == [[1.25, 1.25, 0.25, 0.25], [-0.75]]


def test_the_discount_is_per_step() -> None:
    found = token_advantages([[1.0, 2.0, 4.0]], [[0, 1, 2]], [0], AdvantageSettings(scale="none"), discount=0.5)
    assert found[0].tolist() == pytest.approx([3 - 11 / 3, 4 - 11 / 3, 4 - 11 / 3])


def test_other_groups_do_not_count() -> None:
    alone = token_advantages([[1.0, 0.0], [0.0, 3.0]], [[0, 1], [0, 1]], [0, 0], GRPO)
    both = token_advantages([[1.0, 0.0], [9.0], [0.0, 3.0]], [[0, 1], [0], [0, 1]], [0, 1, 0], GRPO)
    np.testing.assert_array_equal(np.stack(alone), np.stack([both[0], both[2]]))
    assert both[1].tolist() == [0.0]


def test_the_scale_is_the_deviation_of_the_returns() -> None:
    plain = token_advantages([[1.0, 2.0], [1.0, 1.0]], [[0, 1]] * 2, [0, 0], CENTRED)
    scaled = token_advantages([[1.0, 2.0], [1.0, 1.0]], [[0, 1]] * 2, [0, 0], GRPO)
    np.testing.assert_allclose(np.concatenate(scaled), np.concatenate(plain) / np.std([3, 2, 2, 1]), rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        GRPO,
        CENTRED,
        RLOO,
        AdvantageSettings(baseline="leave_one_out"),
        AdvantageSettings(deviation="sample"),
    ],
    ids=str,
)
def test_a_reward_of_the_last_token_gives_all_tokens_the_advantage_of_their_sample(settings: AdvantageSettings) -> None:
    rng = np.random.default_rng(3)
    rewards, groups = rng.random(9), np.repeat([0, 1, 2], [4, 4, 1])
    lengths = rng.integers(1, 9, 9)
    dense = [[0.0] * (length - 1) + [reward] for length, reward in zip(lengths, rewards, strict=True)]
    steps = [range(length) for length in lengths]
    found = token_advantages(dense, steps, groups, settings)
    expected = advantages(rewards, groups, [True] * 9, settings)
    for one, advantage in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, advantage, atol=1e-5)


def test_means_of_a_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="within a group only"):
        token_advantages([[1.0]], [[0]], [0], AdvantageSettings(scale="batch"))


def test_no_samples_have_no_advantages() -> None:
    assert token_advantages([], [], [], GRPO) == []
