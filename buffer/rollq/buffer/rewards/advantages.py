"""Converts rewards to advantages over a step's whole batch, before the batch is split among ranks.

Invariant: a sample that did not complete gets advantage 0 and is left out of every baseline and deviation.
`Batch` computes every rank's share from the same call, so gradients do not depend on the number of ranks.
"""

from collections.abc import Sequence
from math import comb
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from rollq.buffer.rules.settings import Settings
from rollq.buffer.values.rollouts import BoolArray, Float32Array

Float64Array = npt.NDArray[np.float64]

SAME_REWARD = 1e-6
"""Rewards that differ by at most this much count as equal."""


class AdvantageSettings(Settings):
    """How a reward becomes an advantage: `(reward - baseline) / scale`.

    baseline `group`, scale `group`: GRPO, (r - mean) / (std + eps) of the group (Shao et al. 2024, arXiv:2402.03300).
    baseline `group`, scale `none`: Dr. GRPO, which drops the deviation because it favours questions that are nearly
    always or nearly never solved (Liu et al. 2025, arXiv:2503.20783). baseline `leave_one_out`: RLOO, r_i minus the
    mean of the group's other samples (Ahmadian et al. 2024, arXiv:2402.14740). baseline or scale `batch`: mean or
    deviation of all samples that the group's task has in the batch, instead of the group's; rewards of different tasks
    are never compared. The mean of the batch does not combine with the deviation of the group: in a group of equal
    rewards, only `eps` would be left. baseline `opo`: sum(l_i r_i) / sum(l_i) of the group, with l_i the loss tokens of
    a sample; with scale `none`, OPO (Hao et al. 2025, arXiv:2505.23585). `pass_k` = k > 1: pass@k training (Chen et al.
    2025, arXiv:2508.10751), where a sample earns the mean over all draws of k samples of its group that include it, and
    a draw earns 1 if any of its rewards is > 0, else 0. With n samples and m without a reward > 0, the mean is R = 1 -
    C(m, k) / C(n, k), and the deviation that `scale = "group"` divides by is sqrt(R (1 - R)).
    """

    baseline: Literal["group", "leave_one_out", "batch", "opo"] = Field(
        default="group",
        description="mean reward to subtract: the group's, the other samples', the task's in the batch, or the group's "
        "weighted by length",
    )
    pass_k: int = Field(
        default=1, ge=1, description="k of pass@k training: any of k samples must solve the prompt; 1: each one"
    )
    scale: Literal["none", "group", "batch"] = Field(
        default="group", description="standard deviation to divide by: none, the group's, or the task's in the batch"
    )
    deviation: Literal["population", "sample"] = Field(
        default="population", description="divisor of the squares: population: n, sample: n - 1, as in torch"
    )
    eps: float = Field(default=1e-6, gt=0, description="added to the deviation, so that equal rewards give advantage 0")
    draw_correction: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="how far advantages make up for draws by priority: 0, not at all, to 1, in full",
    )

    @property
    def fewer(self) -> int:
        """Squares are divided by the number of samples minus this."""
        return int(self.deviation == "sample")

    @model_validator(mode="after")
    def _measures_agree(self) -> Self:
        if self.baseline == "batch" and self.scale == "group":
            raise ValueError(
                'baseline = "batch" with scale = "group": a group of equal rewards has no deviation, and its distance '
                'from the mean of the batch would be divided by next to nothing; use scale = "batch" or "none"'
            )
        if self.pass_k > 1 and (self.baseline, self.deviation) != ("group", "population"):
            raise ValueError(
                f"pass_k = {self.pass_k}: mean and deviation are over all draws of {self.pass_k} samples of a group; "
                "leave out baseline and deviation, or set pass_k = 1"
            )
        if self.pass_k > 1 and self.scale == "batch":
            raise ValueError(f'pass_k = {self.pass_k}: excludes scale = "batch"; use scale = "group" or "none"')
        return self


def advantages(
    rewards: npt.ArrayLike,
    groups: npt.ArrayLike,
    valid: npt.ArrayLike,
    settings: AdvantageSettings,
    *,
    tasks: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
) -> Float32Array:
    """Advantages float32 [N] of N samples; 0 where `valid` is False.

    `rewards` float [N] is ignored where `valid` bool [N] is False. `groups` int [N] and `tasks` int [N] map samples to
    group and task indices from 0 (without `tasks`, all belong to one task). `lengths` int [N] counts each sample's loss
    tokens, which baseline `opo` needs (None: all are equal). A group of one sample has deviation 0,
    and advantage 0 unless the baseline is `batch`. With `pass_k` > 1, groups of up to `pass_k` samples have advantage
    0.
    """
    keep = np.asarray(valid, dtype=np.bool_)
    group = np.asarray(groups, dtype=np.int64)
    reward = np.where(keep, np.asarray(rewards, dtype=np.float64), 0.0)
    if not keep.any():
        return np.zeros(len(keep), dtype=np.float32)
    if settings.pass_k > 1:
        return _pass_k(reward > 0, group, keep, settings)
    task = np.zeros_like(group) if tasks is None else np.asarray(tasks, dtype=np.int64)
    weight = np.ones_like(reward) if lengths is None else np.asarray(lengths, dtype=np.float64)
    centred = _centred(settings, reward, group, task, weight, keep)
    if settings.scale != "none":
        pool = group if settings.scale == "group" else task
        centred = centred / (_deviation(reward, pool, keep, settings.fewer) + settings.eps)
    return np.where(keep, centred, 0.0).astype(np.float32)


def draw_weights(probabilities: npt.ArrayLike, tasks: npt.ArrayLike, correction: float) -> Float32Array:
    """Factors float32 [G] for the advantages of G groups, which correct for the groups' draw probabilities.

    `probabilities` float [G] is NaN for a group that was not drawn, and `tasks` int [G] maps groups to task indices
    from 0. A factor is (lowest probability among the task's groups / own probability) ** correction, so the largest is
    1: the importance weights of prioritized experience replay (Schaul et al. 2016, arXiv:1511.05952).
    """
    drawn, task = np.asarray(probabilities, np.float64), np.asarray(tasks, np.int64)
    weights = np.ones(len(drawn))
    for number in np.unique(task[~np.isnan(drawn)]):
        of_task = (task == number) & ~np.isnan(drawn)
        weights[of_task] = (drawn[of_task].min() / drawn[of_task]) ** correction
    return weights.astype(np.float32)


def no_advantage(rewards: Sequence[float]) -> bool:
    """Whether a group's valid samples, with these rewards, all have advantage 0.

    Rewards that differ by no more than `SAME_REWARD` count as equal: a score changes that much when its terms are added
    in another order or stored as float32, and a deviation below the default `eps` gives almost no advantage.
    """
    return not rewards or max(rewards) - min(rewards) <= SAME_REWARD


def _centred(
    settings: AdvantageSettings,
    reward: Float64Array,
    group: npt.NDArray[np.int64],
    task: npt.NDArray[np.int64],
    weight: Float64Array,
    keep: BoolArray,
) -> Float64Array:
    """Subtract each sample's baseline from its reward."""
    match settings.baseline:
        case "group":
            return reward - _mean(reward, group, keep)
        case "batch":
            return reward - _mean(reward, task, keep)
        case "opo":
            total = _mean(weight, group, keep)  # 0 if there is no token to train
            return reward - _mean(weight * reward, group, keep) / np.where(total > 0, total, 1.0)
        case "leave_one_out":
            count = _count(group, keep)
            # r_i - (sum - r_i) / (n - 1) = (r_i - mean) * n / (n - 1); a group of one sample has no baseline
            return (reward - _mean(reward, group, keep)) * np.where(count > 1, count / np.maximum(count - 1, 1), 0.0)


def _pass_k(
    is_solved: BoolArray, group: npt.NDArray[np.int64], keep: BoolArray, settings: AdvantageSettings
) -> Float32Array:
    """Advantages of pass@k training, float32 [N]."""
    k, computed = settings.pass_k, np.zeros(len(keep))
    for number in np.unique(group[keep]):
        members = keep & (group == number)
        n = int(members.sum())
        failed = n - int((members & is_solved).sum())
        if not k <= failed < n:  # all draws earn the same reward
            continue
        mean = 1 - comb(failed, k) / comb(n, k)
        earned = np.where(is_solved[members], 1.0, 1 - comb(failed - 1, k - 1) / comb(n - 1, k - 1))
        scale = 1.0 if settings.scale == "none" else (mean * (1 - mean)) ** 0.5 + settings.eps
        computed[members] = (earned - mean) / scale
    return computed.astype(np.float32)


def _count(pool: npt.NDArray[np.int64], keep: BoolArray) -> Float64Array:
    """The number of valid samples in each sample's pool, [N]."""
    return np.bincount(pool[keep], minlength=int(pool.max()) + 1).astype(np.float64)[pool]


def _mean(values: Float64Array, pool: npt.NDArray[np.int64], keep: BoolArray) -> Float64Array:
    """The mean over the valid samples in each sample's pool, [N]; 0 where no sample is valid."""
    sums = np.bincount(pool, weights=np.where(keep, values, 0.0), minlength=int(pool.max()) + 1)[pool]
    return np.asarray(sums / np.maximum(_count(pool, keep), 1.0))


def _deviation(rewards: Float64Array, pool: npt.NDArray[np.int64], keep: BoolArray, fewer: int) -> Float64Array:
    """The standard deviation over the n valid samples in each sample's pool, [N]; divides squares by n - `fewer`."""
    count = _count(pool, keep)
    squares = _mean((rewards - _mean(rewards, pool, keep)) ** 2, pool, keep) * count
    return np.asarray(np.sqrt(squares / np.maximum(count - fewer, 1.0)))
