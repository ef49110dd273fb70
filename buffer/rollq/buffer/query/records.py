"""One group as queries see it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollq.buffer.wire.sample_outcomes import SampleOutcome, longest, rewards_of


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group, as queries see it.

    `uid` is its number within its task; numbers are given in order of arrival, so `arrival` is the same number.
    `staleness` is the staleness of its oldest remaining token at the next train step, 0 without tokens. For an expired
    group, it is the staleness at its expiry. `reward` is the mean over its samples at the last put, None if no finished
    sample is left. `tries` counts its attempts, from 0 again after an interruption or expiry. `error` says why it
    failed or was filtered, or is the error of an earlier try, or "". `step` is the train step that claimed it, or,
    while it is pending or running, the step that it was admitted for, and None in every other status. `listed_step` is
    the same, but never None. `at_ms` is the time of its last put, or else of its admission, in ms since 1970. `row` is
    the row of its prompt in its task's prompts. `samples` are the outcomes of the samples that have started.
    """

    uid: int
    task: str
    status: str
    staleness: int
    arrival: int
    reward: float | None
    tries: int
    error: str = ""
    step: int | None = None
    listed_step: int | None = field(default=None, compare=False)
    at_ms: int | None = field(default=None, compare=False)
    row: int | None = field(default=None, compare=False)
    samples: Sequence[SampleOutcome] = field(default=(), compare=False)

    @property
    def tokens(self) -> int | None:
        """Response tokens of the longest sample; None without samples."""
        return longest(self.samples)

    @property
    def min_reward(self) -> float | None:
        """The lowest reward of a sample; None without rewards."""
        return min(rewards_of(self.samples), default=None)

    @property
    def max_reward(self) -> float | None:
        """The highest reward of a sample; None without rewards."""
        return max(rewards_of(self.samples), default=None)

    @property
    def finish_reason(self) -> frozenset[str]:
        """Every finish reason that one of its samples has."""
        return frozenset(outcome.finish_reason for outcome in self.samples if outcome.finish_reason)

    @property
    def failure(self) -> frozenset[str]:
        """Every failure kind that one of its samples has."""
        return frozenset(outcome.failure for outcome in self.samples if outcome.failure)
