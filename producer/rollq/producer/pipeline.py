"""The experience pipeline: operators that process finished groups before training.

An operator is a function from scored groups to scored groups. It drops groups, changes rewards or sets advantages.
`run_pipeline` applies operators in order. A custom operator is any callable of type `Operator`. Pure.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollq.buffer.errors import ConfigError
from rollq.buffer.rewards.advantages import AdvantageSettings, advantages, no_advantage
from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.rollouts import BoolArray, Float32Array, Group, SampleStatus


@dataclass(frozen=True, slots=True, eq=False)
class ScoredGroup:
    """A group of k samples in the pipeline.

    `rewards` is float32 [k], 0 where not valid. `valid` bool [k] marks completed samples, and never changes.
    `advantages` is float32 [k] once an operator has set it. `dropped` is the reason why the group is not trained, None
    if it is trained.
    """

    group: Group
    rewards: Float32Array
    valid: BoolArray
    advantages: Float32Array | None = None
    dropped: str | None = None

    @classmethod
    def from_group(cls, group: Group) -> "ScoredGroup":
        """The group with its samples' rewards."""
        rewards = [s.reward or 0.0 for s in group.samples]
        return cls(group, np.array(rewards, np.float32), _valid(group))

    def drop(self, reason: str) -> "ScoredGroup":
        """A copy of the group that will not be trained, because of `reason`."""
        return replace(self, dropped=reason)


def _valid(group: Group) -> BoolArray:
    valid = [sample.status is SampleStatus.COMPLETED and sample.reward is not None for sample in group.samples]
    return np.array(valid, np.bool_)


Metrics = Mapping[str, float]

Operator = Callable[[Sequence[ScoredGroup]], Sequence[ScoredGroup] | tuple[Sequence[ScoredGroup], Metrics]]
"""Takes groups that are not dropped, and returns them in the same order, alone or in a tuple with numbers by name."""


def run_pipeline(operators: Sequence[Operator], groups: Sequence[Group]) -> tuple[list[ScoredGroup], dict[str, float]]:
    """Apply the operators in order. Returns all groups in order, and the numbers that operators returned. Later
    operators do not get dropped groups. If two operators return a number of the same name, the later one counts.

    Raises `ConfigError` if an operator does not return the groups it was given, changes which samples are valid, or
    returns misshapen, infinite or NaN numbers.
    """
    scored = [ScoredGroup.from_group(group) for group in groups]
    metrics: dict[str, float] = {}
    for operator in operators:
        remaining = {index: group for index, group in enumerate(scored) if group.dropped is None}
        result, own = _with_metrics(operator(list(remaining.values())))
        _check_result(operator, list(remaining.values()), result)
        metrics |= _checked_metrics(operator, own)
        for index, group in zip(remaining, result, strict=True):
            scored[index] = group
    return scored, metrics


def drop_zero_advantage(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Drop groups whose valid samples all have the same reward: such groups give no gradient (DAPO,
    arXiv:2503.14476)."""
    return [
        group.drop("all rewards are equal") if no_advantage(group.rewards[group.valid].tolist()) else group
        for group in groups
    ]


def clip_rewards(low: float, high: float) -> Operator:
    """Return an operator that clips rewards to [`low`, `high`]. Raises `ConfigError` if `low` exceeds `high`."""
    if low > high:
        raise ConfigError(f"clip_rewards({low!r}, {high!r}): the lower bound comes first")

    def clip(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        return [replace(group, rewards=np.clip(group.rewards, low, high)) for group in groups]

    return clip


def give_advantages(settings: AdvantageSettings) -> Operator:
    """An operator that sets advantages over all groups of the batch; see `AdvantageSettings` for formulas.

    Raises `ConfigError` for baseline `opo`, which needs the samples' lengths.
    """
    if settings.baseline == "opo":
        raise ConfigError("baseline = 'opo' needs the lengths of samples: leave it to the trainer's advantages")

    def give(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        if not groups:
            return []
        sizes = [len(group.rewards) for group in groups]
        flat = advantages(
            np.concatenate([group.rewards for group in groups]),
            np.repeat(np.arange(len(groups)), sizes),
            np.concatenate([group.valid for group in groups]),
            settings,
            tasks=np.repeat(np.unique([task_of(group.group.task) for group in groups], return_inverse=True)[1], sizes),
        )
        shares = np.split(flat, np.cumsum(sizes)[:-1])
        return [replace(group, advantages=share) for group, share in zip(groups, shares, strict=True)]

    return give


group_normalised: Operator = give_advantages(AdvantageSettings())
"""GRPO: (r - mean) / std of the group."""
leave_one_out: Operator = give_advantages(AdvantageSettings(baseline="leave_one_out", scale="none"))
"""RLOO: r minus the mean of the group's other samples."""
reinforce_plus_plus: Operator = give_advantages(AdvantageSettings(baseline="batch", scale="batch"))
"""REINFORCE++: (r - mean) / std over the task's samples in the batch (Hu 2025, arXiv:2501.03262)."""


def _with_metrics(answer: Any) -> tuple[list[ScoredGroup], Metrics]:
    """An operator's returned groups, and its numbers, if any."""
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
        return list(answer[0]), answer[1]
    return list(answer), {}


def _checked_metrics(operator: Operator, metrics: Metrics) -> dict[str, float]:
    try:
        numbers = {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError):
        numbers = {"": math.nan}
    if not all(map(math.isfinite, numbers.values())):
        name = getattr(operator, "__name__", repr(operator))
        raise ConfigError(f"operator {name!r}: returned {dict(metrics)!r:.200} as metrics; finite numbers are needed")
    return numbers


def _check_result(operator: Operator, groups: Sequence[ScoredGroup], result: Sequence[ScoredGroup]) -> None:
    """Raise `ConfigError` unless `result` has the passed groups, with finite numbers for every sample."""
    name = getattr(operator, "__name__", repr(operator))
    if [group.group for group in result] != [group.group for group in groups]:
        raise ConfigError(
            f"operator {name!r}: must return the {len(groups)} groups that it was given, in order; drop one by "
            "`ScoredGroup.drop(reason)`"
        )
    for group in result:
        _check_group(name, group)


def _check_group(operator: str, group: ScoredGroup) -> None:
    samples = len(group.group.samples)
    if not np.array_equal(group.valid, _valid(group.group)):
        raise ConfigError(
            f"operator {operator!r}: group {group.group.group_id}: must not change `valid`, which is read from the "
            "samples; to ignore a sample, give it the advantage 0, or drop the group"
        )
    for field, numbers in (("rewards", group.rewards), ("advantages", group.advantages)):
        if numbers is not None and not _is_finite(numbers, samples):
            raise ConfigError(f"operator {operator!r}: group {group.group.group_id} needs {samples} finite {field}")


def _is_finite(numbers: npt.NDArray[np.floating], samples: int) -> bool:
    return numbers.shape == (samples,) and bool(np.isfinite(numbers).all())
