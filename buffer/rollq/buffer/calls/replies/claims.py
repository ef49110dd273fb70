"""The replies to claims of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rollq.buffer.rules.staleness import Floors
from rollq.buffer.values.rollouts import PipelineOutput


class ClaimedGroup(NamedTuple):
    """One group of a claimed batch, without its samples. `tokens` counts response tokens, and `reward` is the mean over
    samples. `payload` is the key of the samples' frame, '' if it is in the group's rollout. `nonce` belongs to the
    lease that made the samples. `rows` are described in `rollq.buffer.wire.sample_rows`. `uses` says how often the
    group was trained before. `probability` is the probability of its draw, None in an order without draws. `stored`
    has its prompt and the frame of its samples, if they came with the claim."""

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
    """The age of a claimed group's tokens.

    Tokens of dead epochs count as `floors` says. Tokens with a staleness of `token_threshold` or more are masked.
    """

    floors: Floors
    token_threshold: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """The batch of a step; every call for the step returns the same batch, until it is released.

    `counting` has one entry for each group, from its first claim: its tokens never get older than that. `claim_round`
    names this claim for its release; `releases` says how often the step was already released in this epoch.

    While the batch fills, `lack` has the missing groups per task: later calls return the same groups and more. `parts`
    are the ends of its parts, as numbers of groups, and the groups are in the order of the parts. `plan_round` is for
    `Claiming.divide`. `planned` are the groups per task of the whole batch.
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
    """The groups of a task for a claim of a step.

    They are the completed groups that are fresh at the step, the running groups that it waits for because they would be
    too old at the next step, and the groups that must reach the archive first.
    """

    ready: int
    stragglers: int
    unarchived: int

    def is_short_of(self, wanted: int) -> bool:
        """Whether the task holds up a batch that takes `wanted` groups of it."""
        return self.ready < wanted or self.stragglers > 0 or self.unarchived > 0


@dataclass(frozen=True, slots=True)
class Shortfall:
    """No batch yet. For each task that is short, it has the number of groups that are ready, that are wanted, that are
    running and would be too old at the next step, and that must reach the archive first. If no task is short, the last
    batch is being released."""

    step: int
    ready: Mapping[str, int]
    wanted: Mapping[str, int]
    stragglers: Mapping[str, int] = field(default_factory=dict)
    unarchived: Mapping[str, int] = field(default_factory=dict)
