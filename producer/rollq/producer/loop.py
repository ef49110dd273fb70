"""The control loop of a producer process: looks at every task of the run, and schedules what may be scheduled now.

The loop carries no data and keeps no state of its own: what is scheduled, the cursor and who is dead are decided by
the buffer's functions, so any number of producers may run and any of them may die at any instant.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rq import Queue

from rollq.buffer.errors import ServerError, ServerUnavailable
from rollq.buffer.replay import Buffer
from rollq.buffer.schema import Status
from rollq.buffer.settings import TaskRules
from rollq.buffer.tickets import enqueue_tickets, tickets_missing, tickets_queued
from rollq.buffer.values import Counts
from rollq.producer.journal import Journal
from rollq.producer.sampler import Sampler
from rollq.producer.settings import ProducerSettings
from rollq.producer.strategy import MEMORY_LIMIT, POOLS, Plan, State, plan, step_of

log = logging.getLogger(__name__)

PROMPTS_PER_CALL = 64
MIN_PAUSE_S = 0.02  # wake-ups that come faster than this are answered together
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Feed:
    """One task, and where its prompts come from."""

    task: str
    rules: TaskRules
    sampler: Sampler


class Producer:
    """Schedules the groups of all `feeds` until told to stop."""

    def __init__(self, buffer: Buffer, queue: Queue, settings: ProducerSettings, feeds: Sequence[Feed]) -> None:
        self._buffer = buffer
        self._queue = queue
        self._settings = settings
        self._feeds = feeds
        self._journal = Journal()

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set. A server that is away, or full, is waited for.

        Raises `StoreLost` when the run is gone, `ServerRefused` when the server takes away a right, `InvalidPrompt`
        when prompts cannot be used and that is fatal.
        """
        waits = False
        with self._buffer.events() as events:
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
        groups_per_job = self._settings.groups_per_job
        patience = self._buffer.patience
        queued = tickets_queued(self._queue, patience=patience)
        missing = tickets_missing(waiting, queued, groups_per_job)
        enqueue_tickets(self._queue, self._buffer.run, missing, groups_per_job, patience=patience)
        self._journal.report(time.monotonic())

    def _feed(self, feed: Feed, memory_fraction: float) -> int:
        """Tidy one task up and top it up. Returns how many of its groups wait for a worker."""
        reaped = self._buffer.reap(feed.task)
        expired = self._buffer.expire(feed.task)
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

    def _recycle(self, feed: Feed, counts: Counts, made: Plan) -> int:
        pool = sum(counts.statuses.get(status, 0) for status in POOLS)
        if not made.room or not pool:
            return 0
        return self._buffer.recycle(
            feed.task, epoch=counts.clock.epoch, target=made.target, limit=min(made.room, pool), statuses=POOLS
        )

    def _admit(self, feed: Feed, counts: Counts, made: Plan, recycled: int) -> int:
        """Admit new prompts up to the target; each call is for one train step."""
        batch = feed.rules.batch_groups
        cursor = int(counts.progress.get("cursor", 0))
        index = made.outstanding + recycled
        total = 0
        while index < made.target:
            step = step_of(index, batch)
            target = min(made.target, step * batch)
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


def state_of(counts: Counts) -> State:
    """The plain numbers that the strategy decides by."""
    return State(
        version=counts.clock.version,
        control=counts.clock.control,
        consumed=counts.clock.committed * counts.clock.rules.batch_groups,
        statuses=dict(counts.statuses),
    )
