"""The experience pipeline: what becomes of finished groups before they may be trained.

An operator is a function from scored groups to scored groups; it drops some, changes rewards, or gives advantages.
`run_pipeline` applies them in order. Your own is any callable of the same shape. Pure: nothing is written here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rollq.buffer.advantages import AdvantageSettings, advantages
from rollq.buffer.errors import ConfigError
from rollq.buffer.rollouts import BoolArray, Float32Array, Group, SampleStatus


@dataclass(frozen=True, slots=True, eq=False)
class ScoredGroup:
    """A group on its way through the pipeline: k samples.

    `rewards` float32 [k] (0 where not valid), `valid` bool [k], `advantages` float32 [k] once an operator has given
    them. `dropped` says why it is not to be trained.
    """

    group: Group
    rewards: Float32Array
    valid: BoolArray
    advantages: Float32Array | None = None
    dropped: str | None = None

    @classmethod
    def of(cls, group: Group) -> "ScoredGroup":
        """A group as its judge left it."""
        valid = [s.status is SampleStatus.COMPLETED and s.reward is not None for s in group.samples]
        rewards = [s.reward or 0.0 for s in group.samples]
        return cls(group, np.array(rewards, np.float32), np.array(valid, np.bool_))

    def drop(self, reason: str) -> "ScoredGroup":
        """The same group, not to be trained."""
        return replace(self, dropped=reason)


Operator = Callable[[Sequence[ScoredGroup]], Sequence[ScoredGroup]]


def run_pipeline(operators: Sequence[Operator], groups: Sequence[Group]) -> list[ScoredGroup]:
    """Apply the operators in order; each sees the groups that none before it has dropped. Returns all, in order.

    Raises `ConfigError` for an operator that returns other groups than it was given, or numbers that are misshapen or
    not finite.
    """
    scored = [ScoredGroup.of(group) for group in groups]
    for operator in operators:
        kept = [index for index, one in enumerate(scored) if one.dropped is None]
        answer = list(operator([scored[index] for index in kept]))
        _check(operator, [scored[index] for index in kept], answer)
        for index, one in zip(kept, answer, strict=True):
            scored[index] = one
    return scored


def drop_zero_advantage(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Drop groups whose valid samples all have the same reward: they teach nothing (DAPO, arXiv:2503.14476)."""
    return [one.drop("all rewards are equal") if len(np.unique(one.rewards[one.valid])) < 2 else one for one in groups]


def clip_rewards(low: float, high: float) -> Operator:
    """Reward shaping: no reward below `low` or above `high`. Raises `ConfigError` when `low` exceeds `high`."""
    if low > high:
        raise ConfigError(f"clip_rewards({low!r}, {high!r}): the lower bound comes first")

    def clip(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        return [replace(one, rewards=np.clip(one.rewards, low, high)) for one in groups]

    return clip


def give_advantages(settings: AdvantageSettings) -> Operator:
    """Advantages over all groups of the batch; see `AdvantageSettings` for the formulas and their sources."""

    def give(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        if not groups:
            return []
        sizes = [len(one.rewards) for one in groups]
        flat = advantages(
            np.concatenate([one.rewards for one in groups]),
            np.repeat(np.arange(len(groups)), sizes),
            np.concatenate([one.valid for one in groups]),
            settings,
        )
        shares = np.split(flat, np.cumsum(sizes)[:-1])
        return [replace(one, advantages=share) for one, share in zip(groups, shares, strict=True)]

    return give


group_normalised: Operator = give_advantages(AdvantageSettings())
"""GRPO: (r - mean) / std of the group."""
leave_one_out: Operator = give_advantages(AdvantageSettings(baseline="leave_one_out", scale="none"))
"""RLOO: r minus the mean of the group's other samples."""
reinforce_plus_plus: Operator = give_advantages(AdvantageSettings(baseline="batch", scale="batch"))
"""REINFORCE++: (r - mean) / std of the whole batch (Hu 2025, arXiv:2501.03262)."""


def _check(operator: Operator, given: Sequence[ScoredGroup], answer: Sequence[ScoredGroup]) -> None:
    name = getattr(operator, "__name__", repr(operator))
    if [one.group for one in answer] != [one.group for one in given]:
        raise ConfigError(
            f"operator {name!r}: must return the {len(given)} groups that it was given, in order; drop one by "
            "`ScoredGroup.drop(reason)`"
        )
    for one in answer:
        for what, numbers in (("rewards", one.rewards), ("advantages", one.advantages)):
            if numbers is not None and not _finite(numbers, len(one.group.samples)):
                raise ConfigError(
                    f"operator {name!r}: group {one.group.group_id} needs {len(one.group.samples)} finite {what}"
                )


def _finite(numbers: npt.NDArray[np.floating], samples: int) -> bool:
    return numbers.shape == (samples,) and bool(np.isfinite(numbers).all())
