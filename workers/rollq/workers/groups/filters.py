"""Filters decide whether a finished group is worth training.

A filter is a function of (prompt, samples), sync or async, that returns True to keep the group. Filters see only groups
in which all samples have ended and enough have completed. They see the judge's rewards before a length penalty.
Invariant: if a filter raises, takes too long, or returns anything but a bool, the group fails and keeps the reason; the
filter never drops or keeps a group by accident.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rollq.buffer.common.means import present
from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.common.user_functions import FILTER, check_function
from rollq.buffer.errors import RollqError
from rollq.buffer.rewards.advantages import no_advantage
from rollq.buffer.rewards.credit import judged_reward
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import Prompt, Sample, SampleStatus
from rollq.workers.user_code.calls import UserFunction, guarded
from rollq.workers.user_code.errors import reason_of

FilterFunction = Callable[[Prompt, Sequence[Sample]], bool | Awaitable[bool]]

ENDED = (SampleStatus.COMPLETED, SampleStatus.FAILED)


def completed(samples: Iterable[Sample]) -> list[Sample]:
    """The samples that have completed."""
    return [sample for sample in samples if sample.status is SampleStatus.COMPLETED]


def zero_advantage(prompt: Prompt, samples: Sequence[Sample]) -> bool:
    """Whether the completed samples' rewards differ. Equal rewards give the samples no advantage.

    This is DAPO's dynamic sampling (arXiv:2503.14476, section 3.2); the producer replaces dropped groups.
    """
    return not no_advantage(present(sample.reward for sample in completed(samples)))


BUILT_IN: Final[Mapping[str, FilterFunction]] = {"zero_advantage": zero_advantage}


class FilterError(RollqError, RuntimeError):
    """A filter failed. The message names the filter and the reason."""

    kind: Final = FailureKind.GRADER


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter with its name."""

    name: str
    call: UserFunction

    @classmethod
    def load(cls, name: str, timeout_s: float) -> "Filter":
        """A built-in filter, or a custom one by dotted path. Raises `ConfigError` for an unknown filter."""
        function = load_plugin("filter", name, BUILT_IN)
        check_function(function, FILTER, name)
        return cls(name, UserFunction.wrap(function, timeout_s, quick=name in BUILT_IN))

    async def keeps(self, prompt: Prompt, samples: Sequence[Sample]) -> bool:
        """Whether the group is worth training. Raises `FilterError`."""
        try:
            answer = await self.call(prompt, tuple(map(as_judged, samples)))
            with guarded():
                problem = "" if isinstance(answer, bool | np.bool_) else f"returned {answer!r:.80}"
        except Exception as error:
            reason = str(error) if isinstance(error, TimeoutError) else reason_of(error)
            raise FilterError(f"filter {self.name!r}: {reason}") from error
        if problem:
            raise FilterError(f"filter {self.name!r}: {problem}; expected True (keep) or False")
        return bool(answer)


def as_judged(sample: Sample) -> Sample:
    """The sample with the judge's reward."""
    judged = judged_reward(sample)
    return sample if judged == sample.reward else replace(sample, reward=judged)


async def keep(filters: Sequence[Filter], prompt: Prompt, samples: Sequence[Sample]) -> bool:
    """Ask the filters in order, until one drops the group, and return whether every filter keeps it. Raises
    `FilterError`."""
    for one_filter in filters:
        if not await one_filter.keeps(prompt, samples):
            return False
    return True


def is_finished(samples: Sequence[Sample], min_valid: int) -> bool:
    """Whether the group counts as completed: all samples have ended, and at least `min_valid` have completed."""
    return have_ended(samples) and is_enough(samples, min_valid)


def have_ended(samples: Sequence[Sample]) -> bool:
    """Whether all samples have completed or failed."""
    return all(sample.status in ENDED for sample in samples)


def is_enough(samples: Sequence[Sample], min_valid: int) -> bool:
    """Whether at least `min_valid` samples have completed."""
    return sum(sample.status is SampleStatus.COMPLETED for sample in samples) >= min_valid
