"""Credit: the rewards of a sample's single tokens and turns, and the resulting advantages. Pure.

Token rewards are stored as the named array `token_rewards`, float32 [R] over each segment's response tokens. A *step*
is a unit with a separate return: a token, or a turn of the model. Workers put a turn's reward on its last token, and
the trainer sums the rewards of each step.
"""

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from rollq.buffer.errors import ConfigError
from rollq.buffer.rewards.advantages import AdvantageSettings
from rollq.buffer.values.rollouts import BoolArray, Float32Array, Sample, Segment

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
StepKind = Literal["tokens", "turns"]

TOKEN_REWARDS: Final = "token_rewards"
"""Name of the array in `Segment.arrays`."""
TURN_REWARDS: Final = "turn_rewards"
"""Name of the list in `Sample.extra` with an environment's rewards: a number for each turn of the model."""
JUDGED_REWARD: Final = "judged_reward"
"""Name in `Sample.extra` for the judge's reward, if a penalty has changed the reward."""


def judged_reward(sample: Sample) -> float | None:
    """The judge's reward for a sample, before a length penalty."""
    judged: float | None = sample.extra.get(JUDGED_REWARD, sample.reward)
    return judged


def steps_of(segments: Sequence[Segment], kind: StepKind) -> Int64Array:
    """The step, from 0, of each response token in all of a sample's segments, int64 [R].

    A turn is a run of the model's tokens in a segment. The environment's tokens belong to the step before them. If no
    token is in the loss, all tokens count as the model's.
    """
    masks = [_mask(segment) for segment in segments]
    if not any(mask.any() for mask in masks):
        masks = [np.ones_like(mask) for mask in masks]
    if kind == "turns":
        masks = [mask & ~np.concatenate([[False], mask[:-1]]) for mask in masks]
    begins: BoolArray = np.concatenate([np.zeros(0, np.bool_), *masks])
    return np.asarray(np.maximum(begins.cumsum() - 1, 0), np.int64)


def last_tokens(segments: Sequence[Segment], kind: StepKind) -> Int64Array:
    """The indices, among all response tokens, of the model's last token in each of a sample's steps, int64 [K]."""
    masks = np.concatenate([np.zeros(0, np.bool_), *map(_mask, segments)])
    own = np.flatnonzero(masks) if masks.any() else np.arange(len(masks))
    steps = steps_of(segments, kind)[own]
    return own[np.flatnonzero(np.diff(steps, append=-1))]


def token_advantages(
    rewards: Sequence[npt.ArrayLike],
    steps: Sequence[npt.ArrayLike],
    groups: npt.ArrayLike,
    settings: AdvantageSettings,
    *,
    discount: float = 1.0,
) -> list[Float32Array]:
    """Token advantages for N samples, float32 [R_i] each: the return, compared with the group's returns.

    For each sample, `rewards` float [R_i] holds its tokens' rewards, and `steps` int [R_i] maps tokens to steps, from 0
    and never falling; `groups` int [N] maps samples to groups, from 0. A step's reward is the sum of its tokens'
    rewards, and its return is G_k = reward_k + `discount` G_(k+1). All its tokens have the advantage
    (G_k - baseline) / scale.

    `settings` chooses baseline and scale: mean and deviation of the group's returns, in which each sample has the same
    weight, however many steps it has. So a reward on the last token, without a discount, gives every token the
    advantage that `rollq.buffer.rewards.advantages.advantages` gives its sample. Raises `ConfigError` for a baseline or
    scale over the batch, for OPO and for pass@k, which are not supported.
    """
    _check_supported(settings)
    if not len(rewards):
        return []
    places = [np.asarray(of_segment, np.int64) for of_segment in steps]
    returns, is_step = _returns([np.asarray(of_segment, np.float64) for of_segment in rewards], places, discount)
    group = np.asarray(groups, np.int64)
    counts = np.maximum(is_step.sum(axis=1), 1)
    means = returns.sum(axis=1) / counts
    samples = np.bincount(group).astype(np.float64)[group]
    baseline = _group_mean(means, group)
    centred = returns - baseline[:, None]
    if settings.scale == "group":
        spread = (np.where(is_step, centred, 0.0) ** 2).sum(axis=1) / counts
        divisor = np.maximum(samples - settings.fewer, 1)
        scale = np.sqrt(_group_mean(spread, group) * samples / divisor) + settings.eps
    else:
        scale = np.ones_like(means)
    if settings.baseline == "leave_one_out":  # the mean of the others; a group of one sample has no baseline
        others = (baseline * samples - means) / np.maximum(samples - 1, 1)
        centred = np.where(samples[:, None] > 1, returns - others[:, None], 0.0)
    scaled = (centred / scale[:, None]).astype(np.float32)
    return [row[place] for row, place in zip(scaled, places, strict=True)]


def _mask(segment: Segment) -> BoolArray:
    """True on the model's tokens, bool [R]."""
    return np.ones(len(segment.response_ids), np.bool_) if segment.loss_mask is None else segment.loss_mask


def _returns(
    rewards: Sequence[Float64Array], steps: Sequence[Int64Array], discount: float
) -> tuple[Float64Array, BoolArray]:
    """The step returns of N samples, float64 [N, K], and which entries are steps, bool [N, K]."""
    counts = np.array([step[-1] + 1 if len(step) else 0 for step in steps])
    most = int(counts.max())
    returns = np.zeros((len(rewards), most))
    for row, of_segment, step in zip(returns, rewards, steps, strict=True):
        row[:] = np.bincount(step, of_segment, most)
    for place in reversed(range(most - 1)):
        returns[:, place] += discount * returns[:, place + 1]
    return returns, np.arange(most) < counts[:, None]


def _check_supported(settings: AdvantageSettings) -> None:
    if "batch" in (settings.baseline, settings.scale):
        raise ConfigError('baseline and scale "batch": returns of tokens and turns are compared within a group only')
    if settings.baseline == "opo" or settings.pass_k > 1:
        raise ConfigError('baseline = "opo" and pass_k compare whole samples, not the returns of tokens and turns')


def _group_mean(values: Float64Array, group: Int64Array) -> Float64Array:
    """The mean of `values` [N] over each sample's group, [N]."""
    return np.asarray((np.bincount(group, values) / np.maximum(np.bincount(group), 1))[group])
