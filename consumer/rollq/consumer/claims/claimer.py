"""Claims a step's batch. Waits while the batch is short, and gives up if it can never fill."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rollq.buffer.calls.claiming import MOST_FRAME_BYTES
from rollq.buffer.calls.replies.claims import Claimed, Shortfall
from rollq.buffer.errors import (
    ClaimTimeout,
    ConfigError,
    NotClaimed,
    ProductionStalled,
    ProductionStopped,
    ServerError,
    SyncFirst,
)
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.rules.batch_sizes import groups_at
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.rules.shards import shard_of, shards_among, split
from rollq.buffer.store.waiter import Waiter, WakeUps
from rollq.consumer.claims.outlook import Outlook, explain_wait, outlook
from rollq.consumer.claims.prefetch import tokens_of
from rollq.consumer.claims.trainer_lease import TrainerLease

log = logging.getLogger(__name__)

RELEASE_S = 300.0
"""How long other ranks wait for a release by rank 0."""


class BatchSizes:
    """Groups per task in a batch: `fixed`, or else the numbers in each task's rules for the step.

    `rules` holds the tasks' rules as last read (see `refresh`).
    """

    def __init__(self, rules: Mapping[str, TaskRules], fixed: Mapping[str, int]) -> None:
        self.rules = dict(rules)
        self._fixed = dict(fixed)

    @classmethod
    def from_run(cls, buffer: TrainerBuffer, fixed: Mapping[str, int] | None) -> Self:
        """Read the rules of the run's tasks. For a task with shards, `fixed` has the total over all shards.

        Raises `ConfigError` for a run without tasks or without some of a task's shards, for an unknown task in `fixed`,
        and for more groups than are produced for a step.
        """
        fixed = fixed or {}
        clocks = buffer.clocks(buffer.train_tasks())
        rules = {task: clock.rules for task, clock in clocks.items()}
        next_step = max((clock.claimed_step for clock in clocks.values()), default=0) + 1
        if not rules or not all(shards_among(rules, task) for task in fixed):
            raise ConfigError(
                f"batch {dict(fixed)!r}: run {buffer.run!r} has the tasks {list(rules)!r}; a producer registers them"
            )
        _check_all_shards(rules)
        sizes: dict[str, int] = {}
        for task, size in fixed.items():
            sizes |= _sizes_of_shards(rules, task, size, next_step)
        return cls(rules, sizes)

    def refresh(self, buffer: TrainerBuffer) -> None:
        """Read the rules again: they may have changed. Added tasks count as soon as all their shards exist."""
        tasks = buffer.train_tasks()
        for name, clock in buffer.clocks(tasks).items():
            task, _, count = shard_of(name)
            if len(shards_among(tasks, task)) == count:
                self.rules[name] = clock.rules

    def at(self, step: int) -> dict[str, int]:
        """Groups per task in the batch of `step`."""
        return self._fixed or {
            task: groups_at(rules.batch_groups, rules.schedule, step) for task, rules in self.rules.items()
        }


def _check_all_shards(rules: Mapping[str, TaskRules]) -> None:
    """Raise `ConfigError` for a task with missing shards."""
    for name in rules:
        task, _, count = shard_of(name)
        if (present := len(shards_among(rules, task))) < count:
            raise ConfigError(
                f"task {task!r}: {present} of its {count} shards exist; a producer registers them: try again"
            )


def _sizes_of_shards(rules: Mapping[str, TaskRules], task: str, size: int, next_step: int) -> dict[str, int]:
    """A task's groups in a batch, divided among the task's shards."""
    shards = shards_among(rules, task)
    produced = _fewest_groups([rules[shard] for shard in shards], next_step)
    if size > produced:
        raise ConfigError(
            f"task {task!r}: a batch of {size} groups would never fill: batch_groups = {produced} are produced for "
            "each step"
        )
    return dict(zip(shards, split(size, len(shards)), strict=True))


def _fewest_groups(shards: Sequence[TaskRules], next_step: int) -> int:
    """The smallest number of groups that a task's shards together produce for a step, from `next_step` on."""
    changes = {step for rules in shards for step, _ in rules.schedule if step > next_step}
    return min(
        sum(groups_at(rules.batch_groups, rules.schedule, step) for rules in shards) for step in {next_step, *changes}
    )


def _round(claimed: Claimed) -> tuple[int, int]:
    return claimed.claim_round, claimed.plan_round


class BatchClaimer:
    """Claims batches for the trainer that holds `lease`. After every short claim, it calls `short` and then
    `meanwhile`."""

    def __init__(
        self,
        lease: TrainerLease,
        sizes: BatchSizes,
        events: WakeUps,
        stop: threading.Event,
        *,
        rank: int,
        world_size: int,
        seed: int,
        timeout_s: float | None,
        short: Callable[[Shortfall], None],
        meanwhile: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._frame_bytes = MOST_FRAME_BYTES if world_size == 1 else 0  # each of several ranks reads only its share
        self._seed = seed
        self._lease = lease
        self._sizes = sizes
        self._events = events
        self._stop = stop
        self._timeout_s = timeout_s
        self._short = short
        self._meanwhile = meanwhile
        self._given_up = (0, 0)  # a step, and how often it was released

    def give_up(self, step: int) -> None:
        """Do not return the present batch of `step` again; every rank calls this when rank 0 releases the batch."""
        self._given_up = (step, self._releases(step) + 1)

    def _releases(self, step: int) -> int:
        return self._given_up[1] if self._given_up[0] == step else 0

    def claim(self, step: int) -> Claimed | None:
        """Wait for the batch of `step`; None when stopped, or when a task's own hook has ended production and the batch
        cannot fill.

        Raises the exceptions of `Consumer.__next__`.
        """
        return self._wait_for(step, lambda: self._try_claim(step))

    def claim_part(self, step: int, before: Claimed | None, done: int, least_tokens: int) -> Claimed | None:
        """Wait for another part of the batch of `step`, after its first `done` groups. Returns None when `claim` does.

        `before` is the result of the last such call. A part has at least `least_tokens` tokens, unless it is the rest
        of the batch. All ranks get the same parts. A whole batch may have no further part.

        Raises the exceptions of `Consumer.__next__`, and `NotClaimed` when the batch was released since `before`.
        """
        return self._wait_for(step, lambda: self._try_part(step, before, done, least_tokens))

    def _wait_for(self, step: int, ask: Callable[[], Claimed | Shortfall]) -> Claimed | None:
        try:
            self._sizes.refresh(self._lease.buffer)
            return self._wait(step, ask)
        except ServerError:
            if self._stop.is_set():
                return None
            raise

    def _wait(self, step: int, ask: Callable[[], Claimed | Shortfall]) -> Claimed | None:
        shortfall = Shortfall(step, {}, {})
        waiter = Waiter(
            self._events, stop=self._stop, timeout_s=self._timeout_s, explain=lambda: self._explain(shortfall)
        )
        deadline_s = time.monotonic() + RELEASE_S
        # An event or a timer ends each pause. Only the claim itself shows whether the batch is ready.
        for _ in waiter:
            outcome = ask()
            if isinstance(outcome, Claimed):
                return outcome
            shortfall = outcome
            self._short(shortfall)
            if self._is_planned_otherwise(shortfall):
                continue  # the sizes have changed: the shortfall by the old sizes is meaningless
            # a rank that has given the batch up waits until rank 0 releases it
            if not shortfall.wanted and time.monotonic() > deadline_s:
                raise ClaimTimeout(
                    f"this rank released the batch of step {step}, but rank 0 has not done so within {RELEASE_S:g} s: "
                    "restart all ranks. Either only this rank called release(), or the server lost what rank 0 had "
                    "read"
                )
            if (expected := self._outlook(shortfall)) is not Outlook.WAIT:
                # the last running groups may have finished between the claim and the counts
                outcome = ask()
                if isinstance(outcome, Claimed):
                    return outcome
                self._give_up(expected, outcome)
                return None
            self._meanwhile()
        if waiter.timed_out:
            raise ClaimTimeout(waiter.reason)
        return None

    def _is_planned_otherwise(self, shortfall: Shortfall) -> bool:
        """Read the rules again. If they change the size of a task that is short, rank 0 plans the step again. Returns
        whether it did."""
        self._sizes.refresh(self._lease.buffer)
        wanted = self._sizes.at(shortfall.step)
        is_so = all(wanted.get(task, groups) == groups for task, groups in shortfall.wanted.items())
        if is_so or self._rank != 0:
            return False
        return self._lease.buffer.plan_anew(self._lease.epoch, shortfall.step, wanted)

    def _try_part(self, step: int, before: Claimed | None, done: int, least_tokens: int) -> Claimed | Shortfall:
        latest = before
        while True:
            outcome = self._try_claim(step, so_far=True, known=latest)
            if not isinstance(outcome, Claimed):
                return outcome
            if before is not None and _round(before) != _round(outcome):
                raise NotClaimed(f"the batch of step {step} was released while it was trained: drop its gradients")
            latest = outcome
            is_over = outcome.lack is None and len(outcome.groups) == done
            if is_over or any(end > done for end in outcome.parts):
                return outcome
            if outcome.lack is not None and sum(map(tokens_of, outcome.groups[done:])) < least_tokens:
                return outcome.lack
            self._lease.buffer.divide(self._lease.epoch, outcome)  # another rank may have been first

    def _try_claim(self, step: int, *, so_far: bool = False, known: Claimed | None = None) -> Claimed | Shortfall:
        outcome = self._lease.buffer.claim(
            self._lease.epoch,
            step,
            self._sizes.at(step),
            so_far=so_far,
            known=known,
            seed=self._seed,
            frame_bytes=self._frame_bytes,
        )
        if not isinstance(outcome, Claimed) or outcome.releases >= self._releases(step):
            return outcome
        if self._rank == 0:
            raise NotClaimed(
                f"the server no longer knows that the batch of step {step} was released: it lost acknowledged data, "
                "for example in a failover. Resume from the newest checkpoint"
            )
        return Shortfall(step, {}, {})  # rank 0 has not released it yet

    def _outlook(self, shortfall: Shortfall) -> Outlook:
        buffer = self._lease.buffer
        counts = [buffer.counts(task) for task in shortfall.wanted]
        return outlook(shortfall, counts, buffer.fullness())

    def _give_up(self, expected: Outlook, shortfall: Shortfall) -> None:
        """Raise an error that says why the batch cannot fill. Return if a task's hook has ended production."""
        match expected:
            case Outlook.SYNC_FIRST:
                raise SyncFirst(
                    f"the live weights are too old for step {shortfall.step}; publish the weights of step "
                    f"{shortfall.step - 1}, then ask for it again"
                )
            case Outlook.STALLED:
                raise ProductionStalled(self._explain(shortfall))
            case Outlook.STOPPED:
                raise ProductionStopped(self._explain(shortfall))
            case _:
                log.info("production has ended: %s", self._explain(shortfall))

    def _explain(self, shortfall: Shortfall) -> str:
        buffer = self._lease.buffer
        counts = [buffer.counts(task) for task in self._sizes.at(shortfall.step)]
        return explain_wait(shortfall, counts, buffer.workers(), buffer.fullness())
