"""The replies to claims of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rollq.buffer.rules.staleness import Floors
from rollq.buffer.values.rollouts import PipelineOutput


class ClaimedGroup(NamedTuple):
    """One group of a claimed batch, without its samples. `tokens` counts response tokens, and `reward` is the mean over
    samples. `payload` is the key of the samples' frame, '' if the frame is in the group's rollout. `nonce` belongs to
    the lease that made the samples. `rollq.buffer.wire.sample_rows` describes `rows`. `uses` says how often the group
    was trained before. `probability` is the group's probability of being drawn, None in an order without draws.
    `stored` holds the prompt and the samples' frame if the claim's reply included them."""

    task: str
    group_id: int
    oldest_version: int
    arrival: int
    tries: int
    tokens: int
    reward: float
    payload: str = ""
    nonce: str = ""
    rows: bytes = b""
    shaped: PipelineOutput | None = None
    uses: int = 0
    probability: float | None = None
    stored: tuple[bytes, ...] = ()


class Counting(NamedTuple):
    """How the age of a claimed group's tokens counts.

    `floors` determines the versions of tokens from dead epochs. Tokens with a staleness of `token_threshold` or more
    are masked.
    """

    floors: Floors
    token_threshold: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """A step's batch; every call for the step returns the same batch, until it is released.

    `counting` has one entry per group, from the group's first claim: its tokens never get older than they were then.
    `claim_round` names this claim for its release; `releases` says how often the step was already released in this
    epoch.

    While the batch fills, `lack` has the number of missing groups per task: later calls return the same groups and
    more. Groups are ordered by part; `parts` holds the number of groups up to each part's end. `plan_round` is for
    `Claiming.divide`. `planned` holds the whole batch's number of groups per task.
    """

    step: int
    groups: tuple[ClaimedGroup, ...]
    counting: tuple[Counting, ...]
    claim_round: int
    releases: int
    planned: Mapping[str, int]
    parts: tuple[int, ...] = ()
    plan_round: int = 0
    lack: "Shortfall | None" = None


class Readiness(NamedTuple):
    """A task's group counts for a claim of a step.

    They count completed groups that are fresh at the step, running groups that the claim waits for because they would
    be too old at the next step, and groups that must reach the archive first.
    """

    ready: int
    stragglers: int
    unarchived: int

    def is_short_of(self, wanted: int) -> bool:
        """Whether the task holds up a batch that takes `wanted` of its groups."""
        return self.ready < wanted or self.stragglers > 0 or self.unarchived > 0


@dataclass(frozen=True, slots=True)
class Shortfall:
    """No batch yet. Each short task has its numbers of groups that are ready, that are wanted, that are running and
    would be too old at the next step, and that must reach the archive first. If no task is short, the last batch is
    being released."""

    step: int
    ready: Mapping[str, int]
    wanted: Mapping[str, int]
    stragglers: Mapping[str, int] = field(default_factory=dict)
    unarchived: Mapping[str, int] = field(default_factory=dict)
