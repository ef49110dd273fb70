"""The control loop of a producer process: looks at every task of the run, and schedules what may be scheduled now.

The loop carries no data and keeps no state of its own: what is scheduled, the cursor and who is dead are decided by
the buffer's functions, so any number of producers may run and any of them may die at any instant.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rq import Queue

from rollq.buffer.batch_sizes import groups_through
from rollq.buffer.batches import MAX_FILL
from rollq.buffer.errors import InvalidPrompt, ServerError, ServerUnavailable
from rollq.buffer.replies import Control, Counts
from rollq.buffer.roles import ProducerBuffer
from rollq.buffer.rollouts import Prompt, Status
from rollq.buffer.settings import TaskRules
from rollq.producer.progress_log import ProgressLog
from rollq.producer.sampler import PromptSource, Sampler
from rollq.producer.settings import ProducerSettings
from rollq.producer.strategy import MEMORY_LIMIT, SchedulePlan, TaskState, plan, step_of, too_little_kept

log = logging.getLogger(__name__)

PROMPTS_PER_CALL = 64
MIN_PAUSE_S = 0.02  # wake-ups that come faster than this are answered together
RETRY_S = 1.0
LOOKS_AT = ("admit", "batch", "claim", "commit", "control", "expire", "publish", "put", "release")
"""Wake-ups after which there may be room, or something to tidy up. A put of completed groups alone is none of them."""


ShouldContinue = Callable[[TaskState], bool]
"""A task's own word on whether production goes on; False ends it for good."""


@dataclass(frozen=True, slots=True)
class TaskFeed:
    """One task: where its prompts come from, and what ends its production."""

    task: str
    rules: TaskRules
    sampler: Sampler
    min_keep_rate: float = 0.0
    should_continue: ShouldContinue | None = None


@dataclass(frozen=True, slots=True)
class EvaluationFeed:
    """One evaluation, and the rows that it asks, all of them in order."""

    task: str
    source: PromptSource
    on_bad_prompt: Literal["skip", "fail"]


class Producer:
    """Schedules the groups of all `feeds` until told to stop, and those of evaluations that the trainer asks for."""

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
        self._hooks_failed: set[str] = set()
        self._journal = ProgressLog()

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set. A server that is away, or full, is waited for.

        Raises `StoreLost` when the run is gone, `ServerRefused` when the server takes away a right, `InvalidPrompt`
        when prompts cannot be used and that is fatal.
        """
        waits = False
        with self._buffer.events(*LOOKS_AT) as events:
            while not stop.is_set():
                try:
                    self.tick()
                except ServerError as error:
                    if not self._passes(error):
                        raise
                    if not waits and not stop.is_set():
                        log.warning("%s - production waits", error)
                    waits = True
                    stop.wait(RETRY_S)
                    continue
                if waits:
                    log.info("the server serves again, production goes on")
                waits = False
                stop.wait(MIN_PAUSE_S)
                events.wait(self._settings.tick_s)

    def _passes(self, error: ServerError) -> bool:
        """Whether waiting helps: a full server drains unaided, one that refuses for another reason does not."""
        try:
            return isinstance(error, ServerUnavailable) or self._buffer.memory_fraction() >= MEMORY_LIMIT
        except ServerUnavailable:
            return True

    def tick(self) -> None:
        """One look at every task, then at the tickets."""
        memory_fraction = self._buffer.memory_fraction()
        waiting = sum(self._feed(feed, memory_fraction) for feed in self._feeds)
        waiting += sum(self._serve(evaluation) for evaluation in self._evaluations)
        self._buffer.enqueue_missing_tickets(self._queue, waiting, self._settings.groups_per_job)
        self._journal.report(time.monotonic())

    def _feed(self, feed: TaskFeed, memory_fraction: float) -> int:
        """Tidy one task up and top it up. Returns how many of its groups wait for a worker."""
        reaped = self._buffer.reap(feed.task)
        expired = self._buffer.expire(feed.task)
        counts = self._buffer.counts(feed.task)
        if counts.clock.control is Control.RUN and self._ends(feed, counts):
            counts = self._buffer.counts(feed.task)
        made = plan(self._settings, feed.rules, state_of(counts), memory_fraction)
        recycled = self._recycle(feed, counts, made)
        admitted = self._admit(feed, counts, made, recycled) if made.room > recycled else 0
        self._journal.note(
            feed.task,
            made,
            {
                "new prompts": admitted,
                "rolled again": recycled,
                "expired": expired,
                "taken from dead workers": reaped.requeued,
                "quarantined": reaped.quarantined,
            },
        )
        return counts.statuses.get(Status.PENDING, 0) + recycled + admitted

    def _recycle(self, feed: TaskFeed, counts: Counts, made: SchedulePlan) -> int:
        pool = sum(counts.statuses.get(status, 0) for status in made.pools)
        if made.room <= 0 or not pool:
            return 0
        return self._buffer.recycle(
            feed.task, epoch=counts.clock.epoch, target=made.target, limit=min(made.room, pool), statuses=made.pools
        )

    def _admit(self, feed: TaskFeed, counts: Counts, made: SchedulePlan, recycled: int) -> int:
        """Admit new prompts up to the target; each call is for one train step."""
        rules = feed.rules
        cursor = int(counts.progress.get("cursor", 0))
        index = made.outstanding + recycled
        total = 0
        while index < made.target:
            step = step_of(index, rules, made.last_step)
            target = made.target
            if step < made.last_step:
                target = min(target, groups_through(rules.batch_groups, rules.schedule, step))
            prompts = feed.sampler.prompts_from(cursor, min(target - index, PROMPTS_PER_CALL))
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
        """End the task's production when its hook says so, or too little of it is worth training; whether it did.

        Only what runs is ended: meanwhile a trainer may have sent the engines to sleep, and would wait for it in vain.
        """
        if too_little_kept(counts.outcomes, counts.kept, feed.rules.keep_window, feed.min_keep_rate):
            reason = diagnosis(feed, counts, self._buffer.last_error(feed.task))
            log.error("task %s: production stops: %s", feed.task, reason)
            self._buffer.set_control(feed.task, Control.STOPPED, reason, only_from=Control.RUN)
        elif feed.should_continue is not None and not self._asks(feed.task, feed.should_continue, state_of(counts)):
            log.info("task %s: its should_continue hook has ended production", feed.task)
            reason = "its should_continue hook said so"
            self._buffer.set_control(feed.task, Control.DONE, reason, only_from=Control.RUN)
        else:
            return False
        return True

    def _asks(self, task: str, hook: ShouldContinue, state: TaskState) -> bool:
        try:
            return bool(hook(state))
        except Exception:  # the user's code: a mistake in it must not end a run
            if task not in self._hooks_failed:
                log.exception("task %s: its should_continue hook failed, which counts as going on", task)
            self._hooks_failed.add(task)
            return True

    def _serve(self, feed: EvaluationFeed) -> int:
        """Fill the batches of an evaluation that are open. Returns how many of its groups wait for a worker."""
        self._buffer.reap(feed.task)
        for batch in self._buffer.running_batches(feed.task):
            size = batch.size
            while not batch.closed:
                # rows that cannot be used are passed over, so the number of a group is not that of its row
                prompts = usable_rows(feed.source, size, MAX_FILL + 1, feed.on_bad_prompt)
                last = len(prompts) <= MAX_FILL
                size = self._buffer.fill_batch(feed.task, batch.handle, size, prompts, last=last)
                batch = self._buffer.batch_by_handle(feed.task, batch.handle)
        return self._buffer.counts(feed.task).statuses[Status.PENDING]


def usable_rows(source: PromptSource, start: int, n: int, on_bad_prompt: Literal["skip", "fail"]) -> list[Prompt]:
    """Up to `n` usable prompts in the order of the file, from the one with number `start` (from 0) on.

    Raises `InvalidPrompt` for a bad row when `on_bad_prompt` is "fail".
    """
    found: list[Prompt] = []
    for row in range(source.rows):
        try:
            found.append(source.prompt(row))
        except InvalidPrompt:
            if on_bad_prompt == "fail":
                raise
        if len(found) == start + n:
            break
    return found[start:]


def diagnosis(feed: TaskFeed, counts: Counts, last_error: str) -> str:
    """Why production of a task stops, and what to do."""
    progress = counts.progress
    return (
        f"{counts.kept} of the last {counts.outcomes} groups were worth training, less than min_keep_rate = "
        f"{feed.min_keep_rate}; so far {int(progress.get('filtered', 0))} were filtered and "
        f"{int(progress.get('failed', 0))} failed"
        + (f", the last one with: {last_error}" if last_error else "")
        + ". Look at the judge, the filters and how hard the prompts are, then `rollq resume`"
    )


def state_of(counts: Counts) -> TaskState:
    """The plain numbers that the strategy decides by."""
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
