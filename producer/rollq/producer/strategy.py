"""How many groups may be scheduled now, and from which pools: pure decisions on plain numbers.

The bound is absolute and cumulative. Groups generated for train step `t` are fresh when trained only if `t - version -
1 < threshold`, so production runs up to step `version + threshold` and no further. Every group that counts towards a
step (trained, claimed, completed, in flight) counts against that target. Filtered, failed and dropped groups do not
count, and are replaced. No call depends on earlier calls.

A group that may be trained several times counts for several steps: see `stock_for_reuse`.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from rollq.buffer.rules.batch_sizes import groups_at, groups_through
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.values.memory_use import FULL, Fullness
from rollq.buffer.values.rollouts import SCHEDULED, Status
from rollq.producer.settings import ProducerSettings

MAX_ADAPTED = 3.0
"""The largest over-sampling by the keep rate, in batches."""


@dataclass(frozen=True, slots=True)
class TaskState:
    """A task's state, for the strategy and `should_continue` hooks. `version` is the live version, -1 before the first
    trainer; `step` is trained next; `consumed` counts the groups of all trained steps; `statuses` counts groups by
    status. Of the last `outcomes` finished groups, `kept` were worth training.
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
        """The cumulative number of groups that are or may be trained, which the buffer also counts at admission."""
        return self.consumed + sum(self.statuses.get(status, 0) for status in SCHEDULED)


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """A plan to schedule groups until `outstanding` is `target`, first from `pools` in order, then new prompts.

    `last_step` is the train step of the last group. `reason` says why no groups may be scheduled, and is empty if some
    may.
    """

    target: int
    outstanding: int
    last_step: int
    pools: tuple[Status, ...]
    reason: str = ""

    @property
    def room(self) -> int:
        """Number of groups that may be scheduled now."""
        return 0 if self.reason else self.target - self.outstanding


def plan_production(settings: ProducerSettings, rules: TaskRules, state: TaskState, fullness: Fullness) -> SchedulePlan:
    """Plan one task. `fullness` is the whole buffer's."""
    pools, tail_batch = draw_on(rules, state)
    ahead = rules.sync_weights_interval if settings.strategy == "sync" else rules.stale_threshold
    last_step = max(0, state.version + ahead)
    target = groups_through(rules.batch_groups, rules.schedule, last_step)
    if rules.max_uses > 1:
        target = state.consumed + stock_for_reuse(rules, state, last_step, target - state.consumed)
    if settings.strategy == "async" and not tail_batch:
        target += over_sampled(settings, rules, state)
    target = min(target, state.outstanding + max(1, math.floor(min(fullness.room_groups, target))))
    return SchedulePlan(target, state.outstanding, last_step, pools, _obstacle(target, state, fullness))


def draw_on(rules: TaskRules, state: TaskState) -> tuple[tuple[Status, ...], bool]:
    """The pools to use before new prompts, in order, and whether this is a tail batch.

    Interrupted groups go first. Expired groups follow at once, or wait until there are `tail_batch_trigger_size` of
    them. Then they precede all others, without over-sampling. Dropped groups are in no pool.
    """
    trigger = rules.tail_batch_trigger_size
    if trigger > 0:
        if state.statuses.get(Status.EXPIRED, 0) >= trigger:
            return (Status.EXPIRED, Status.ABORTED), True
        return (Status.ABORTED,), False
    return (Status.ABORTED, Status.EXPIRED), False


def over_sampled(settings: ProducerSettings, rules: TaskRules, state: TaskState) -> int:
    """The number of groups to schedule beyond the bound: ceil(over_sample x batch).

    With `adaptive_over_sample` and a full window of outcomes, the number compensates for groups that will not be kept:
    one of 1 / keep_rate groups is kept, so (1 / keep_rate - 1) batches are added, at most `MAX_ADAPTED`.
    """
    share = settings.over_sample
    if settings.adaptive_over_sample and state.outcomes >= rules.keep_window:
        share += min(MAX_ADAPTED, state.outcomes / state.kept - 1) if state.kept else MAX_ADAPTED
    return math.ceil(share * groups_at(rules.batch_groups, rules.schedule, state.step))


def stock_for_reuse(rules: TaskRules, state: TaskState, last_step: int, window: int) -> int:
    """Number of groups to have beyond the consumed groups, if each is trained up to `max_uses` times; `window`
    otherwise.

    A group is fresh for the steps up to `last_step` and cools down in between, which limits its uses. One more batch
    than is cooling down is allowed, so that groups are generated while a batch is trained. The next batch always has
    room: groups that cool down or are trained are not in it, and may exceed its window after larger batches.
    """
    step = state.step

    def groups_to(last: int) -> int:
        through = groups_through(rules.batch_groups, rules.schedule, last)
        return through - groups_through(rules.batch_groups, rules.schedule, step - 1)

    spacing = rules.reuse_cooldown_steps + 1
    uses = min(rules.max_uses, max(0, last_step - step) // spacing + 1)
    stock = min(window, max(groups_to(step + spacing), math.ceil(groups_to(last_step) / uses)))
    claimed = state.statuses.get(Status.CLAIMED, 0)
    next_step = step + 1 if claimed else step
    next_batch = groups_at(rules.batch_groups, rules.schedule, next_step) if next_step <= last_step else 0
    return max(stock, state.statuses.get(Status.COOLING, 0) + claimed + next_batch)


def step_of(index: int, rules: TaskRules, last_step: int) -> int:
    """Train step (from 1) of the group with cumulative number `index` (from 0); at most `last_step`.

    Groups beyond the batches of `last_step` also belong to it.
    """

    def through(step: int) -> int:
        return groups_through(rules.batch_groups, rules.schedule, step)

    steps = range(1, last_step)
    return 1 + bisect_right(steps, index, key=through)


def too_little_kept(outcomes: int, kept: int, window: int, min_keep_rate: float) -> bool:
    """Whether less than `min_keep_rate` of a full `window` of finished groups was worth training."""
    return outcomes >= window and kept < min_keep_rate * outcomes


def _obstacle(target: int, state: TaskState, fullness: Fullness) -> str:
    if state.control != "run":
        return f"the task is set to {state.control!r}" + (f": {state.control_reason}" if state.control_reason else "")
    if state.version < 0:
        return "no trainer has started yet"
    if fullness.is_full:
        return (
            f"{fullness}; admission continues below {FULL:.0%}: raise {fullness.limit}, or let the trainer commit and "
            "checkpoint"
        )
    if state.outstanding >= target:
        return f"everything that version {state.version} allows is scheduled; production continues with a newer version"
    return ""
