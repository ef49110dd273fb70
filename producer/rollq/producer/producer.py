"""A producer process's control loop: it reads every task's state and schedules as many groups as allowed.

The loop holds no state: the buffer's functions decide what is scheduled, where the cursor is and which workers are
dead, so any number of producers may run, and any of them may die at any time.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rq import Queue

from rollq.buffer.calls.batches import MAX_FILL
from rollq.buffer.calls.payload_removal import Audit
from rollq.buffer.calls.replies.batches import BatchState
from rollq.buffer.calls.replies.tasks import Control, Counts
from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import BatchOver, ServerError, ServerUnavailable
from rollq.buffer.roles import ProducerBuffer
from rollq.buffer.rules.batch_sizes import groups_through
from rollq.buffer.rules.shards import task_of
from rollq.buffer.store.pubsub import EventKind
from rollq.buffer.values.memory_use import Fullness
from rollq.buffer.values.places import Place
from rollq.buffer.values.rollouts import Status
from rollq.producer.progress_log import Move, ProgressLog
from rollq.producer.row_account import RowAccount
from rollq.producer.sampler import Sampler
from rollq.producer.settings import ProducerSettings
from rollq.producer.strategy import SchedulePlan, TaskState, plan_production, step_of, too_little_kept
from rollq.producer.usable_rows import AllExcluded, UsableRows

log = logging.getLogger(__name__)

PROMPTS_PER_CALL = 64
MIN_PAUSE_S = 0.02  # wake-ups within this time are handled together
LONGEST_PAUSE_S = 1.0  # without a reap for 3 s or more, the buffer assumes an outage and declares no worker dead
RETRY_S = 1.0
WAKE_UPS = frozenset(EventKind) - {EventKind.COMPLETED, EventKind.WORKER}
"""Wake-ups after which groups may be scheduled or swept. A put of completed groups is not among them."""


ShouldContinue = Callable[[TaskState], bool]
"""A task's hook that returns whether production continues. False ends it permanently."""


MOST_NAMED = 5
"""How many prompts a line of the log names."""


@dataclass(frozen=True, slots=True)
class TaskFeed:
    """A task with its prompt source and the conditions that end its production."""

    task: str
    sampler: Sampler
    max_prompt_tokens: int
    min_keep_rate: float = 0.0
    should_continue: ShouldContinue | None = None
    stop_after_failures: int = 0


@dataclass(frozen=True, slots=True)
class EvaluationFeed:
    """An evaluation with its prompts: all usable rows, in order."""

    task: str
    rows: UsableRows


class Producer:
    """Schedules groups for all `feeds` until stopped, and fills the evaluations that the trainer opens."""

    def __init__(
        self,
        buffer: ProducerBuffer,
        queue: Queue,
        settings: ProducerSettings,
        feeds: Sequence[TaskFeed],
        evaluations: Sequence[EvaluationFeed] = (),
    ) -> None:
        self._buffer = buffer
        self._queue = queue
        self._settings = settings
        self._feeds = feeds
        self._evaluations = evaluations
        self._log_once = LogOnce(log)
        self._progress = ProgressLog()
        self._audit = Audit(buffer)
        self._rows = RowAccount(buffer)
        self._place = Place.here()
        self._exhausted: dict[str, int] = {}  # each task's cursor after which no prompts are left
        self._exclusions: dict[str, int] = {}  # number of manual changes to each task's rows at the last check
        self._too_long: dict[str, int] = {}  # groups of each task dropped as too long by the last check

    def run(self, stop: threading.Event) -> None:
        """Schedule until `stop` is set. Waits while the server is unavailable or full.

        Raises `StoreLost` if the run is gone, `ServerRefused` if the server withdraws a right, and `InvalidPrompt` if
        too many prompts are unusable.
        """
        waiting = False
        with self._buffer.events(*WAKE_UPS) as events:
            while not stop.is_set():
                try:
                    self.tick()
                except ServerError as error:
                    if not self._is_temporary(error):
                        raise
                    if not waiting and not stop.is_set():
                        log.warning("%s; production waits", error)
                    waiting = True
                    stop.wait(RETRY_S)
                    continue
                if waiting:
                    log.info("the server is available again: production continues")
                waiting = False
                stop.wait(MIN_PAUSE_S)
                events.wait(LONGEST_PAUSE_S)

    def _is_temporary(self, error: ServerError) -> bool:
        """Whether waiting helps: a full server drains, but other refusals persist."""
        try:
            return isinstance(error, ServerUnavailable) or self._buffer.memory().is_full
        except ServerUnavailable:
            return True

    def tick(self) -> None:
        """Schedule once for every task and evaluation, then add missing tickets."""
        fullness = self._buffer.fullness()
        waiting = sum(self._top_up(feed, fullness) for feed in self._feeds)
        waiting += sum(self._fill_evaluation(evaluation) for evaluation in self._evaluations)
        self._buffer.enqueue_missing_tickets(self._queue, waiting, self._settings.groups_per_job)
        self._audit.step(time.monotonic())
        self._progress.report(time.monotonic())

    def _top_up(self, feed: TaskFeed, fullness: Fullness) -> int:
        """Sweep one task and schedule groups up to its target. Returns how many of the task's groups wait for a
        worker."""
        reaped = self._buffer.reap(feed.task, self._place)
        expired = self._buffer.expire(feed.task)
        self._buffer.collect(feed.task)
        counts = self._buffer.counts(feed.task)
        if counts.clock.control is Control.RUN and self._ends(feed, counts):
            counts = self._buffer.counts(feed.task)
        self._leave_out_too_long(feed, counts)
        self._leave_out_excluded(feed, counts)
        plan = plan_production(self._settings, counts.clock.rules, task_state(counts), fullness)
        recycled = self._recycle(feed, counts, plan)
        admitted = self._admit_rows_that_are_left(feed, counts, plan, recycled) if plan.room > recycled else 0
        moved = {
            Move.ADMITTED: admitted,
            Move.RECYCLED: recycled,
            Move.EXPIRED: expired,
            Move.REQUEUED: reaped.requeued,
            Move.QUARANTINED: reaped.quarantined,
        }
        self._progress.note(feed.task, plan, moved)
        return counts.statuses.get(Status.PENDING, 0) + recycled + admitted

    def _leave_out_too_long(self, feed: TaskFeed, counts: Counts) -> None:
        """Skip prompts that workers found too long since the last call, or before this producer started."""
        dropped = int(counts.progress.get("dropped_too_long", 0))
        if dropped != self._too_long.get(feed.task, 0):
            too_long = self._buffer.rows_too_long(feed.task)
            rows = {row: tokens for row, tokens in too_long.items() if tokens > feed.max_prompt_tokens}
            new = sorted(rows.keys() - feed.sampler.rows.bad)
            place = feed.sampler.rows.source.place
            feed.sampler.rows.leave_out(rows)
            self._too_long[feed.task] = dropped
            if new:
                log.warning(
                    "task %s: %d prompts are longer than max_prompt_tokens = %d and are left out, %d so far: %s%s",
                    feed.task,
                    len(new),
                    feed.max_prompt_tokens,
                    len(rows),
                    ", ".join(f"{place(row)} ({rows[row]} tokens)" for row in new[:MOST_NAMED]),
                    ", ..." if len(new) > MOST_NAMED else "",
                )

    def _leave_out_excluded(self, feed: TaskFeed, counts: Counts) -> None:
        """Apply an operator's exclusions and inclusions of rows since the last call."""
        changes = int(counts.progress.get("exclusions", 0))
        if changes != self._exclusions.get(feed.task, 0):
            found = self._buffer.excluded_rows(feed.task)
            feed.sampler.rows.exclude(found.rows)
            self._exclusions[feed.task] = changes
            log.info("task %s: %d rows of its prompts are excluded by hand", feed.task, len(found.rows))
            if found.of_another_file:
                log.warning(
                    "task %s: %d rows were excluded when the task had other prompts, so they are used; `rollq groups "
                    "exclude %s` lists the excluded rows",
                    feed.task,
                    found.of_another_file,
                    task_of(feed.task),
                )

    def _recycle(self, feed: TaskFeed, counts: Counts, plan: SchedulePlan) -> int:
        """Reschedule interrupted and expired groups, up to the target. Returns how many."""
        pool = sum(counts.statuses.get(status, 0) for status in plan.pools)
        if plan.room <= 0 or not pool:
            return 0
        return self._buffer.recycle(
            feed.task, epoch=counts.clock.epoch, target=plan.target, limit=min(plan.room, pool), statuses=plan.pools
        )

    def _admit_rows_that_are_left(self, feed: TaskFeed, counts: Counts, plan: SchedulePlan, recycled: int) -> int:
        """Admit new prompts up to the target. Returns how many. Pauses the task if all its usable rows are excluded."""
        try:
            feed.sampler.rows.check_some_are_left()
            return self._admit(feed, counts, plan, recycled)
        except AllExcluded as error:
            undo = f"`rollq groups exclude {task_of(feed.task)} ROW --undo`"
            resume = f"`rollq resume --task {feed.task}`"
            reason = f"{error}; include a row again: {undo}, then {resume}"
            log.error("task %s: production pauses: %s", feed.task, reason)
            self._buffer.set_control(feed.task, Control.PAUSE, reason, only_from=Control.RUN)
            return 0

    def _admit(self, feed: TaskFeed, counts: Counts, plan: SchedulePlan, recycled: int) -> int:
        """Admit new prompts up to the target; each call is for one train step. Returns how many."""
        rules = counts.clock.rules
        cursor = int(counts.progress.get("cursor", 0))
        index = plan.outstanding + recycled
        total = 0
        while index < plan.target:
            step = step_of(index, rules, plan.last_step)
            target = plan.target
            if step < plan.last_step:
                target = min(target, groups_through(rules.batch_groups, rules.schedule, step))
            with self._rows.keeping(feed.task, feed.sampler.rows) as passed:
                prompts = feed.sampler.prompts_from(cursor, min(target - index, PROMPTS_PER_CALL))
                if not prompts:
                    self._exhausted[feed.task] = cursor
                    break
                passed.append(prompts[-1][1])
            admitted = self._buffer.admit(
                feed.task, prompts, epoch=counts.clock.epoch, cursor=cursor, target=target, step=step
            )
            lost_race = not admitted.count and admitted.cursor != cursor
            cursor = admitted.cursor
            total += admitted.count
            if not lost_race:
                index = index + admitted.count if admitted.count == len(prompts) else target
        return total

    def _ends(self, feed: TaskFeed, counts: Counts) -> bool:
        """End the task's production if all groups fail, too few are kept, or its hook returns False. Returns whether it
        ended.

        Production that has just been paused is left alone: a trainer may have put the engines to sleep, and would wait
        forever.
        """
        if 0 < feed.stop_after_failures <= counts.failed_in_a_row:
            self._stop(feed, all_failed(counts, feed.stop_after_failures))
        elif too_little_kept(counts.outcomes, counts.kept, counts.clock.rules.keep_window, feed.min_keep_rate):
            self._stop(feed, diagnosis(feed, counts))
        elif self._passes_are_over(feed.task, counts):
            log.info("task %s: production has ended after %d passes", feed.task, feed.sampler.passes)
            reason = f"passes = {feed.sampler.passes} are complete"
            self._buffer.set_control(feed.task, Control.DONE, reason, only_from=Control.RUN)
        elif feed.should_continue is not None and not self._should_continue(
            feed.task, feed.should_continue, task_state(counts)
        ):
            log.info("task %s: its should_continue hook has ended production", feed.task)
            reason = "its should_continue hook ended it"
            self._buffer.set_control(feed.task, Control.DONE, reason, only_from=Control.RUN)
        else:
            return False
        return True

    def _passes_are_over(self, task: str, counts: Counts) -> bool:
        """Whether all prompts were admitted and no group is being sampled or will be."""
        again = {Status.PENDING, Status.RUNNING, Status.ABORTED}
        if counts.clock.rules.tail_batch_trigger_size == 0:
            again.add(Status.EXPIRED)
        is_at_end = self._exhausted.get(task) == int(counts.progress["cursor"])
        return is_at_end and not any(counts.statuses[status] for status in again)

    def _stop(self, feed: TaskFeed, reason: str) -> None:
        log.error("task %s: production stops: %s", feed.task, reason)
        self._buffer.set_control(feed.task, Control.STOPPED, reason, only_from=Control.RUN)

    def _should_continue(self, task: str, hook: ShouldContinue, state: TaskState) -> bool:
        try:
            return bool(hook(state))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code: a mistake in it must not end a run
            self._log_once.warning(
                task, "task %s: its should_continue hook failed, so production continues", task, exc_info=error
            )
            return True

    def _fill_evaluation(self, feed: EvaluationFeed) -> int:
        """Fill the open batches of an evaluation. Returns how many of its groups wait for a worker."""
        self._buffer.reap(feed.task, self._place)
        self._buffer.collect(feed.task)
        for batch in self._buffer.running_batches(feed.task):
            with suppress(BatchOver):  # the trainer has closed it since
                self._fill_batch(feed, batch)
        return self._buffer.counts(feed.task).statuses[Status.PENDING]

    def _fill_batch(self, feed: EvaluationFeed, batch: BatchState) -> None:
        size = batch.size
        while not batch.closed:
            # unusable rows are skipped, so group numbers differ from row numbers
            with self._rows.keeping(feed.task, feed.rows):
                prompts = feed.rows.prompts_from(size, MAX_FILL + 1)
            last = len(prompts) <= MAX_FILL
            size = self._buffer.fill_batch(feed.task, batch.handle, size, prompts, last=last)
            batch = self._buffer.batch_by_handle(feed.task, batch.handle)


def all_failed(counts: Counts, limit: int) -> str:
    """Explain why production of a task stops when every group fails."""
    error = f"; the last error: {counts.last_error.text}" if counts.last_error else ""
    reached = f"the limit stop_after_failures = {limit} is reached"
    return f"all of the last {counts.failed_in_a_row} groups failed: {reached}{error}"


def diagnosis(feed: TaskFeed, counts: Counts) -> str:
    """Explain why production of a task stops when too little is kept."""
    progress = counts.progress
    return (
        f"{counts.kept} of the last {counts.outcomes} groups were worth training, less than min_keep_rate = "
        f"{feed.min_keep_rate}; so far {int(progress.get('filtered', 0))} were filtered and "
        f"{int(progress.get('failed', 0))} failed"
        + (f"; the last error: {counts.last_error.text}" if counts.last_error else "")
        + ". Check the judge, the filters and the difficulty of the prompts"
    )


def task_state(counts: Counts) -> TaskState:
    """Extract the numbers that the strategy needs from a task's counts."""
    clock = counts.clock
    return TaskState(
        version=clock.version,
        step=clock.step,
        control=clock.control.value,
        control_reason=clock.control_reason,
        consumed=groups_through(clock.rules.batch_groups, clock.rules.schedule, clock.committed),
        statuses=dict(counts.statuses),
        outcomes=counts.outcomes,
        kept=counts.kept,
    )
