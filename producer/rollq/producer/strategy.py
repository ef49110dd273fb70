"""How many groups may be scheduled now, and from where: pure decisions on plain numbers.

The bound is absolute and cumulative: groups made for train step `t` are fresh when trained only if
`t - version - 1 < threshold`, so production runs up to step `version + threshold` and no further. Every group that
still counts towards a step (trained, claimed, completed, in flight) is set against that target; filtered, failed and
dropped ones are not, and are replaced thereby. Nothing here remembers earlier calls.
"""

import math
from dataclasses import dataclass

from rollq.buffer.schema import Status
from rollq.buffer.settings import TaskRules
from rollq.producer.settings import ProducerSettings

MEMORY_LIMIT = 0.8
"""Share of the server's maxmemory from which on nothing new is admitted: the rest is for results in flight."""

POOLS = (Status.ABORTED, Status.EXPIRED)
"""What is sampled again before new prompts are, in this order, under every strategy: else their prompts were lost."""

_COUNTED = (Status.PENDING, Status.RUNNING, Status.COMPLETED, Status.CLAIMED)


@dataclass(frozen=True, slots=True)
class State:
    """What the buffer says of a task. `version` -1: no trainer has begun. `consumed`: a batch for each trained step."""

    version: int
    control: str
    consumed: int
    statuses: dict[Status, int]

    @property
    def outstanding(self) -> int:
        """Cumulative groups that are trained, or on their way to be; the buffer counts the same when it admits."""
        return self.consumed + sum(self.statuses.get(status, 0) for status in _COUNTED)


@dataclass(frozen=True, slots=True)
class Plan:
    """`room` groups may be added until `outstanding` is `target`; first from `POOLS`, then new prompts.

    `reason` says what keeps room at 0; empty when there is room.
    """

    target: int
    outstanding: int
    reason: str = ""

    @property
    def room(self) -> int:
        """Groups that may be added now."""
        return 0 if self.reason else self.target - self.outstanding


def plan(settings: ProducerSettings, rules: TaskRules, state: State, memory_fraction: float) -> Plan:
    """Decide for one task. `memory_fraction`: used share of the server's maxmemory, 0 when it has no limit."""
    if settings.strategy == "sync":
        threshold, surplus = rules.sync_weights_interval, 0
    else:
        threshold, surplus = rules.stale_threshold, math.ceil(settings.over_sample * rules.batch_groups)
    target = target_groups(rules, state.version, threshold) + surplus
    return Plan(target, state.outstanding, _obstacle(target, state, memory_fraction))


def target_groups(rules: TaskRules, version: int, threshold: int) -> int:
    """Groups that all steps up to `version + threshold` need together."""
    return rules.batch_groups * (version + threshold)


def step_of(index: int, batch_groups: int) -> int:
    """Train step (from 1) that the group with cumulative number `index` (from 0) is for."""
    return index // batch_groups + 1


def _obstacle(target: int, state: State, memory_fraction: float) -> str:
    if state.control != "run":
        return f"the run is set to {state.control!r}"
    if state.version < 0:
        return "no trainer has begun an epoch yet"
    if memory_fraction >= MEMORY_LIMIT:
        return (
            f"the server's memory is full to {memory_fraction:.0%} of maxmemory; admission goes on below "
            f"{MEMORY_LIMIT:.0%}: raise maxmemory, or let the trainer commit and checkpoint"
        )
    if state.outstanding >= target:
        return f"all that version {state.version} allows is scheduled; a newer version lets production go on"
    return ""
