"""How many groups may be scheduled now, and from where: pure decisions on plain numbers.

The bound is absolute and cumulative: groups made for train step `t` are fresh when trained only if
`t - version - 1 < threshold`, so production runs up to step `version + threshold` and no further. Every group that
still counts towards a step (trained, claimed, completed, in flight) is set against that target; filtered, failed and
dropped ones are not, and are replaced thereby. Nothing here remembers earlier calls.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from rollq.buffer.batch_sizes import groups_at, groups_through
from rollq.buffer.rollouts import Status
from rollq.buffer.settings import TaskRules
from rollq.producer.settings import ProducerSettings

MEMORY_LIMIT = 0.8
"""Share of the server's maxmemory from which on nothing new is admitted: the rest is for results in flight."""
MAX_ADAPTED = 3.0
"""Over-sampling adapts to the keep rate up to so many batches."""

_COUNTED = (Status.PENDING, Status.RUNNING, Status.COMPLETED, Status.GATHERED, Status.COOLING, Status.CLAIMED)


@dataclass(frozen=True, slots=True)
class TaskState:
    """What the buffer says of a task.

    `version`: live weights, -1 before the first trainer; `step`: trained next. `consumed`: a batch for each trained
    step. `kept` of the last `outcomes` finished groups were worth training.
    """

    version: int
    step: int
    control: str
    control_reason: str
    consumed: int
    statuses: Mapping[Status, int]
    outcomes: int = 0
    kept: int = 0

    @property
    def outstanding(self) -> int:
        """Cumulative groups that are trained, or on their way to be; the buffer counts the same when it admits."""
        return self.consumed + sum(self.statuses.get(status, 0) for status in _COUNTED)


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """`room` groups may be added until `outstanding` is `target`: first from `pools`, in order, then new prompts.

    `last_step`: the train step of the last of them. `reason` says what keeps room at 0; empty when there is room.
    """

    target: int
    outstanding: int
    last_step: int
    pools: tuple[Status, ...]
    reason: str = ""

    @property
    def room(self) -> int:
        """Groups that may be added now."""
        return 0 if self.reason else self.target - self.outstanding


def plan(settings: ProducerSettings, rules: TaskRules, state: TaskState, memory_fraction: float) -> SchedulePlan:
    """Decide for one task. `memory_fraction`: used share of the server's maxmemory, 0 when it has no limit."""
    pools, tail_batch = draw_on(rules, state)
    ahead = rules.sync_weights_interval if settings.strategy == "sync" else rules.stale_threshold
    last_step = max(0, state.version + ahead)
    target = groups_through(rules.batch_groups, rules.schedule, last_step)
    if settings.strategy == "async" and not tail_batch:
        target += over_sampled(settings, rules, state)
    return SchedulePlan(target, state.outstanding, last_step, pools, _obstacle(target, state, memory_fraction))


def draw_on(rules: TaskRules, state: TaskState) -> tuple[tuple[Status, ...], bool]:
    """The pools that are drawn on before new prompts, in order; and whether this is a tail batch.

    Groups that were interrupted go first. Expired ones follow at once, or wait until `tail_batch_trigger_size` of them
    have come together: then they go first, and nothing is over-sampled. Dropped ones are in no pool.
    """
    trigger = rules.tail_batch_trigger_size
    if trigger > 0:
        if state.statuses.get(Status.EXPIRED, 0) >= trigger:
            return (Status.EXPIRED, Status.ABORTED), True
        return (Status.ABORTED,), False
    return (Status.ABORTED, Status.EXPIRED), False


def over_sampled(settings: ProducerSettings, rules: TaskRules, state: TaskState) -> int:
    """Groups that are scheduled beyond the bound: ceil(over_sample x batch).

    With `adaptive_over_sample`, and the window of outcomes full, also what makes up for groups that will not be kept:
    of 1 / keep_rate groups one is kept, so (1 / keep_rate - 1) batches more, at most `MAX_ADAPTED`.
    """
    share = settings.over_sample
    if settings.adaptive_over_sample and state.outcomes >= rules.keep_window:
        share += min(MAX_ADAPTED, state.outcomes / state.kept - 1) if state.kept else MAX_ADAPTED
    return math.ceil(share * groups_at(rules.batch_groups, rules.schedule, state.step))


def step_of(index: int, rules: TaskRules, last_step: int) -> int:
    """Train step (from 1) that the group with cumulative number `index` (from 0) is for; at most `last_step`.

    What is scheduled beyond the batches of `last_step` is for it too.
    """

    def through(step: int) -> int:
        return groups_through(rules.batch_groups, rules.schedule, step)

    steps = range(1, last_step)
    return 1 + bisect_right(steps, index, key=through)


def too_little_kept(outcomes: int, kept: int, window: int, min_keep_rate: float) -> bool:
    """Whether less than `min_keep_rate` of a full window of finished groups was worth training."""
    return outcomes >= window and kept < min_keep_rate * outcomes


def _obstacle(target: int, state: TaskState, memory_fraction: float) -> str:
    if state.control != "run":
        return f"the task is set to {state.control!r}" + (f": {state.control_reason}" if state.control_reason else "")
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
