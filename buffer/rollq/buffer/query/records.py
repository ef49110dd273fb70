"""One group as queries see it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollq.buffer.wire.sample_outcomes import SampleOutcome, longest, rewards_of


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group, as queries see it.

    `uid` is the group's number within its task; numbers are given in order of arrival, so `arrival` is the same number.
    `staleness` is the oldest remaining token's staleness at the next train step, 0 without tokens; for an expired
    group, it is the staleness at expiry. `reward` is the mean over the samples at the last put, None if no finished
    sample is left. `tries` counts attempts, from 0 again after an interruption or expiry. `error` says why the group
    failed or was filtered, or is an earlier try's error, or "". `step` is the train step that claimed the group, or,
    while it is pending or running, the step that it was admitted for; it is None in every other status. Where it is
    None, `listed_step` is the step that the group was trained at or admitted for. `at_ms` is the time of the last put,
    or else of admission, in ms since 1970. `row` is the prompt's row in the task's prompts. `samples` holds the
    outcomes of the samples that have started.
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
        """The longest sample's number of response tokens; None without samples."""
        return longest(self.samples)

    @property
    def min_reward(self) -> float | None:
        """The lowest sample reward; None without rewards."""
        return min(rewards_of(self.samples), default=None)

    @property
    def max_reward(self) -> float | None:
        """The highest sample reward; None without rewards."""
        return max(rewards_of(self.samples), default=None)

    @property
    def finish_reason(self) -> frozenset[str]:
        """The finish reasons of all samples."""
        return frozenset(outcome.finish_reason for outcome in self.samples if outcome.finish_reason)

    @property
    def failure(self) -> frozenset[str]:
        """The failure kinds of all samples."""
        return frozenset(outcome.failure for outcome in self.samples if outcome.failure)
