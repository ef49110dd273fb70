"""A recorded run as the source of a trainer's batches: its archive, without a server, producers or workers."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy.typing as npt

from rollq.buffer.archive.reader import Archive
from rollq.buffer.archive.rows import TrainedGroup
from rollq.buffer.calls.claiming import ReleaseMode
from rollq.buffer.calls.evaluation_metrics import MetricFunction
from rollq.buffer.calls.replies.tasks import Production
from rollq.buffer.errors import ArchiveError, InvalidGroup
from rollq.buffer.weights.probe import Probe
from rollq.consumer.batches.batch import Batch
from rollq.consumer.batches.sequences import TokenStaleness
from rollq.consumer.settings import ConsumerSettings

log = logging.getLogger(__name__)


class BatchSource(Iterator[Batch], Protocol):
    """The part of a `Consumer` that a trainer needs. `Consumer` documents it."""

    @property
    def epoch(self) -> int: ...
    @property
    def lineage(self) -> str: ...
    @property
    def replayed_through(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def sync_weights_interval(self) -> int: ...
    def publish(self, weights: Any, *, step: int, probe: Probe | None = None) -> int: ...
    def commit(self, batch: Batch) -> None: ...
    def saving(self) -> AbstractContextManager[None]: ...
    def checkpoint(self, step: int) -> None: ...
    def release(self, batch: Batch, mode: ReleaseMode) -> None: ...
    def take_production(self) -> dict[str, Production]: ...
    def annotate(self, batch: Batch, values: Mapping[str, npt.ArrayLike], sequences: npt.ArrayLike) -> None: ...
    def report(self, facts: Mapping[str, Any]) -> None: ...
    def evaluate(
        self,
        names: Sequence[str] | None = None,
        *,
        timeout_s: float | None = None,
        detailed: bool = False,
        function: MetricFunction | None = None,
    ) -> dict[str, float]: ...


class RecordedRun(BatchSource):
    """The batches of a run's archive, in the order and the form in which they were trained.

    Nothing is published, evaluated or reported. Each step's batch orders its tasks by name.
    """

    epoch = 0
    replayed_through = 0
    sync_weights_interval = 1

    def __init__(
        self,
        archive: Archive,
        *,
        resume_from: int = 0,
        settings: ConsumerSettings | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """`resume_from` is the last trained step; 0 begins with the archive's first step.

        Raises `ArchiveError` for an archive of several runs.
        """
        self._archive = archive
        self._settings = settings or ConsumerSettings()
        self._stop = stop or threading.Event()
        self._lineage = lineage_of(archive)
        self._files = archive.steps()
        self._step = resume_from + 1 if resume_from else self._first_step()
        self._epochs: dict[int, int] = {}  # step -> epoch of the trainer that trained it
        # the batch before the first shows which trainer this one must follow (see `_check_history`)
        if trained := self._batch(resume_from):
            self._epochs[resume_from] = trained[0].trainer_epoch
        if not resume_from and self._step > 1:
            log.warning("%s starts with step %d: it is trained from the initial weights", archive.url, self._step)

    @property
    def lineage(self) -> str:
        """The lineage of weights that were trained on this archive. The trainer of a live run refuses it."""
        return self._lineage

    @property
    def step(self) -> int:
        """The step that is trained next."""
        return self._step

    def _check_end(self) -> None:
        """Raise `ArchiveError` if the archive has a later batch, so that the missing batch is a gap and not the end."""
        if later := next((step for step in self._files if step > self._step and self._batch(step)), None):
            raise ArchiveError(
                f"{self._archive.url}: step {self._step} is not in the archive, but step {later} is: the trainer "
                "skipped it, or its file was removed"
            )

    def __next__(self) -> Batch:
        """The batch of the next step. Ends after the archive's last batch, and when `stop` is set.

        Raises `ArchiveError` if the archive lacks the batch or some of its groups, and for a batch of a trainer whose
        successor went back to an earlier step.
        """
        if self._stop.is_set():
            raise StopIteration
        groups = self._batch(self._step)
        if not groups:
            self._check_end()
            raise StopIteration
        self._check_history(groups[0].trainer_epoch)
        return Batch.build(
            self._step,
            [trained.group for trained in groups],
            staleness=[TokenStaleness(self._step, trained.floors, trained.token_threshold) for trained in groups],
            settings=self._settings.advantages,
            rank=self._settings.rank,
            world_size=self._settings.world_size,
            reduction=self._settings.reduction,
        )

    def _check_history(self, epoch: int) -> None:
        """Raise `ArchiveError` for a batch of a trainer whose successor went back to an earlier step."""
        before = self._epochs.get(self._step - 1, 0)
        if epoch < before:
            raise ArchiveError(
                f"{self._archive.url}: step {self._step} does not continue step {self._step - 1}: the trainer of epoch "
                f"{epoch} trained it, then the trainer of epoch {before} went back and trained step {self._step - 1} "
                f"again. Set steps = {self._step - 1} in [trainer] to end there"
            )
        self._epochs[self._step] = epoch

    def _first_step(self) -> int:
        return next((step for step in self._files if self._batch(step)), 1)

    def _batch(self, step: int) -> list[TrainedGroup]:
        return self._archive.batch(step, self._files.get(step, []))

    def publish(self, weights: Any, *, step: int, probe: Probe | None = None) -> int:
        """Store nothing, and return 0 bytes: no worker needs the weights."""
        return 0

    def commit(self, batch: Batch) -> None:
        """Move on to the next step."""
        self._step = batch.step + 1

    def saving(self) -> AbstractContextManager[None]:
        """Do nothing: nobody watches."""
        return nullcontext()

    def checkpoint(self, step: int) -> None:
        """Do nothing: the archive is never changed."""

    def release(self, batch: Batch, mode: ReleaseMode) -> None:
        """Raise `InvalidGroup`: the step has no other batch."""
        raise InvalidGroup(f"step {batch.step}: its batch cannot be trained, and a recorded run has no replacement")

    def take_production(self) -> dict[str, Production]:
        """Return nothing: a recorded run has no production."""
        return {}

    def annotate(self, batch: Batch, values: Mapping[str, npt.ArrayLike], sequences: npt.ArrayLike) -> None:
        """Do nothing: the archive is never changed."""

    def report(self, facts: Mapping[str, Any]) -> None:
        """Do nothing: nobody watches."""

    def evaluate(
        self,
        names: Sequence[str] | None = None,
        *,
        timeout_s: float | None = None,
        detailed: bool = False,
        function: MetricFunction | None = None,
    ) -> dict[str, float]:
        """Return no metrics: no worker can sample the prompts."""
        return {}


def lineage_of(archive: Archive) -> str:
    """The lineage of weights that are trained on an archive."""
    return f"archive-{archive.run()[1]}:0"
