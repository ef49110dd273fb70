"""The timeout of one attempt at a group: the setting, or less once groups' durations are known."""

from collections import defaultdict
from dataclasses import dataclass, field

from rollq.buffer.values.rollouts import Lease

WARM_UP_GROUPS = 100
MEANS = 3.0


def attempt_timeout_s(longest_s: float, finished: int, mean_s: float) -> float:
    """The timeout after `finished` groups took `mean_s` on average: three times the mean, at most `longest_s`.

    Before `WARM_UP_GROUPS` have finished, the timeout is `longest_s` (the dynamic timeout of Trinity-RFT's explorer).
    """
    return longest_s if finished < WARM_UP_GROUPS else min(longest_s, MEANS * mean_s)


@dataclass(slots=True)
class _Durations:
    finished: int = 0
    total_s: float = 0.0


@dataclass(slots=True)
class AttemptTimeouts:
    """The timeout of each attempt. Each task has its own statistics, and evaluations always get the full timeout."""

    longest_s: float
    dynamic: bool = False
    _durations: defaultdict[str, _Durations] = field(default_factory=lambda: defaultdict(_Durations))

    def note(self, lease: Lease, seconds: float) -> None:
        """Note that a group has finished."""
        if not lease.evaluation:
            durations = self._durations[lease.task]
            durations.finished += 1
            durations.total_s += seconds

    def of(self, lease: Lease) -> float:
        """The current timeout of an attempt at this group, in seconds."""
        if not self.dynamic or lease.evaluation:
            return self.longest_s
        durations = self._durations[lease.task]
        mean_s = durations.total_s / max(1, durations.finished)
        return attempt_timeout_s(self.longest_s, durations.finished, mean_s)
