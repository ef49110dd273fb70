"""Takes a step's batch, either whole or part by part while it fills. Replaces an unreadable batch."""

import logging
from collections.abc import Iterator
from dataclasses import replace

from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import CorruptGroup, NotClaimed
from rollq.consumer.batches.batch import Batch
from rollq.consumer.claims.activity import Activity
from rollq.consumer.claims.batch_builder import BatchBuilder
from rollq.consumer.claims.claimer import BatchClaimer
from rollq.consumer.claims.colocation import ColocatedEngines
from rollq.consumer.claims.prefetch import Prefetch
from rollq.consumer.claims.stream import expected_counts
from rollq.consumer.claims.trainer_lease import TrainerLease
from rollq.consumer.settings import ConsumerSettings

log = logging.getLogger(__name__)


class BatchTaker:
    """Takes batches for the trainer that holds `lease`. Engines that share its GPUs sleep once a batch has arrived."""

    def __init__(
        self,
        lease: TrainerLease,
        claimer: BatchClaimer,
        engines: ColocatedEngines,
        prefetch: Prefetch,
        activity: Activity,
        settings: ConsumerSettings,
    ) -> None:
        self.last_step = lease.epoch.from_step
        """The step of the last returned batch."""
        self._lease = lease
        self._claimer = claimer
        self._engines = engines
        self._prefetch = prefetch
        self._activity = activity
        self._settings = settings
        self._committed = 0  # the last step that this trainer committed
        self._returned: tuple[int, int] | None = None  # the step and claim round of the last batch
        self._log_once = LogOnce(log)

    def take(self, step: int) -> Batch | None:
        """Wait for the batch of `step`; None when production or the trainer has ended.

        Raises the exceptions of `Consumer.__next__`.
        """
        self._prefetch.pause()
        self._activity.wait(step)
        while (claimed := self._claimer.claim(step)) is not None:
            self._check_committed(claimed)
            if not self._engines.sleep(claimed.step):
                break
            try:
                batch = self._builder().build(claimed)
            except CorruptGroup as error:
                self._replace(claimed, error)
            else:
                self._activity.train(claimed.step)
                self._note_whole(batch)
                return batch
        return None

    def parts(self, step: int, least_tokens: int) -> Iterator[tuple[Batch | None, Batch | None]]:
        """The parts of the batch of `step`. The whole batch comes with or after the last part."""
        self._prefetch.pause()
        builder = self._builder()
        claimed, done, expected = None, 0, None
        while True:
            self._activity.wait(step)
            claimed = self._claimer.claim_part(step, claimed, done, least_tokens)
            if claimed is None:
                return
            if not done:
                self._check_committed(claimed)
            end = next((end for end in claimed.parts if end > done), done)
            try:
                part = builder.build(claimed, done, end)
            except CorruptGroup as error:
                self._replace(claimed, error)
                if done:
                    raise
                builder, claimed = self._builder(), None
                continue
            self._activity.train(step)
            whole = None
            if claimed.lack is None and end == len(claimed.groups):
                whole = replace(part, part=tuple(range(end)))
                self._note_whole(whole)
            if end > done:
                expected = expected or expected_counts(part.task_counts, end, claimed.planned)
                yield replace(part, expected_counts=expected), whole
            else:  # the wanted number of groups has fallen since
                yield None, whole
            if whole is not None:
                return
            done = end

    def give_up(self, step: int) -> None:
        """Do not return the present batch of `step` again; every rank calls this when rank 0 releases the batch."""
        self._claimer.give_up(step)

    def note_committed(self, step: int) -> None:
        """Note that this trainer has committed `step`. From now on, the server must have the commit."""
        self._committed = step

    def _builder(self) -> BatchBuilder:
        return BatchBuilder(self._lease, self._prefetch, self._settings)

    def _note_whole(self, batch: Batch) -> None:
        """Note that a whole batch is returned, and begin to read the next."""
        self.last_step = batch.step
        self._warn_of_repeat(batch)
        self._prefetch.begin(batch.step + 1)

    def _warn_of_repeat(self, batch: Batch) -> None:
        """Warn once if a loop gets the same batch again because it neither committed nor released it."""
        if self._returned == (batch.step, batch.claim_round):
            self._log_once.warning(
                "repeat",
                "step %d was requested again, and returns the same batch: call `commit(batch)` after training it, or "
                "`release` to give it up; a loop that does neither trains the same batch forever",
                batch.step,
            )
        self._returned = batch.step, batch.claim_round

    def _check_committed(self, claimed: Claimed) -> None:
        """Raise `NotClaimed` if the server has lost a commit: the batch may hold groups that were just trained."""
        for task in {group.task for group in claimed.groups} if self._committed else ():
            if (server_step := self._lease.buffer.clock(task).committed) < self._committed:
                raise NotClaimed(
                    f"the server lost its last moments, as in a failover: step {self._committed} of task {task!r} was "
                    f"committed, but the last step that it knows is {server_step}. Resume from the last checkpoint"
                )

    def _replace(self, claimed: Claimed, error: CorruptGroup) -> None:
        """Give up a batch with an unreadable group. Every rank reads the same bytes, so the others wait for rank 0."""
        log.error("step %d: %s; the group is quarantined, and the step gets a new batch", claimed.step, error)
        if self._settings.rank == 0:
            self._lease.buffer.release(
                self._lease.epoch, claimed.step, "return", claim_round=claimed.claim_round,
                bad={error.task: [error.group_id]},
            )  # fmt: skip
            self._engines.wake()
        self._claimer.give_up(claimed.step)  # after the release, so an unanswered release is requested again
