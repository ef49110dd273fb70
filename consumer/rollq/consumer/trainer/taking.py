"""Takes a step's batch for the reference trainer: whole, or part by part while it fills.

All ranks make the same calls. Rank 0 leads: it waits, and decides for all.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rollq.buffer.errors import CorruptGroup, ProductionStalled, ProductionStopped, SyncFirst
from rollq.consumer.batches.batch import Batch
from rollq.consumer.claims.stream import BatchStream, why_whole
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.learner import Learner
from rollq.consumer.trainer.ranks import Ranks
from rollq.consumer.trainer.recorded_run import BatchSource

log = logging.getLogger(__name__)

STEPS_LOOKED_AT = 5
LEAST_SHARE = 0.1
"""Overlapping is worthwhile if both filling and training take at least this fraction of their sum."""
LEAST_S = 1.0
"""Overlapping is worthwhile if both filling and training take at least this long. A stream needs more calls, and its
micro-batches are smaller."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of a step in seconds: filling, from the request for its batch until the batch was whole, and training.
    They overlap in a streamed step.
    """

    fill_s: float
    train_s: float


@dataclass(slots=True)
class Taken:
    """A batch, and the time spent on it: `wait_s` without any work, `fill_s` until it was whole, and `train_s` on its
    parts. `metrics` cover its `parts`, whose gradients are accumulated; with 0 parts, there are no gradients."""

    batch: Batch
    metrics: LossMetrics = field(default_factory=LossMetrics)
    wait_s: float = 0.0
    fill_s: float = 0.0
    train_s: float = 0.0
    parts: int = 0


def is_worth_streaming(times: Sequence[StepTimes]) -> bool:
    """Whether the next step trains while its batch fills, given how long both took in the last steps. Pure.

    If training is short, starting early gains little. If the batch arrives at once, as with an asynchronous trainer,
    there is no wait.
    """
    last = times[-STEPS_LOOKED_AT:]
    if not last:
        return False
    fill_s, train_s = sum(step.fill_s for step in last) / len(last), sum(step.train_s for step in last) / len(last)
    return min(fill_s, train_s) >= max(LEAST_S, LEAST_SHARE * (fill_s + train_s))


def may_stream(settings: TrainerSettings) -> bool:
    """Whether nothing in the settings of a trainer needs the whole batch before the first gradient. Pure."""
    return settings.updates_per_batch == 1 and why_whole(settings.consumer(), settings.loss) is None


class BatchTaker:
    """Takes the batches of a trainer. After the word `end`, `ended` is the error that says why production was
    stopped."""

    def __init__(
        self,
        consumer: BatchSource,
        learner: Learner,
        settings: TrainerSettings,
        ranks: Ranks,
        stop: threading.Event,
        *,
        stream: Callable[..., BatchStream] | None,
        has_unsaved: Callable[[], bool],
    ) -> None:
        """`stream` is a consumer's `stream`, if its batches may be trained while they fill. `has_unsaved` returns
        whether a checkpoint would cover more steps than the last checkpoint."""
        self._consumer = consumer
        self._learner = learner
        self._settings = settings
        self._ranks = ranks
        self._stop = stop
        self._stream = stream if may_stream(settings) else None
        self._has_unsaved = has_unsaved
        self._times: list[StepTimes] = []
        self._found: Batch | None = None
        self.ended: ProductionStopped | None = None

    def note(self, taken: Taken, train_s: float) -> None:
        """Note the duration of a step; `train_s` is its total training time."""
        self._times = [*self._times, StepTimes(taken.fill_s, train_s)][-STEPS_LOOKED_AT:]

    def take(self) -> Taken | str:
        """Wait for the next batch. If it is trained while it fills, the learner has its gradients afterwards.

        Returns a word if another action is due: `publish` or `checkpoint` if the batch waits for it, `end` if
        production was stopped, `stop` if the trainer is stopped or a hook has ended production, or `again` to take the
        batch once more.
        """
        if self._stream is not None and self._ranks.lead(self._is_streamed):
            return self._take_parts(self._stream(self._settings.micro_batch_tokens, loss=self._settings.loss))
        started_s = time.monotonic()
        word = self._ranks.lead(lambda: self._ask(self._consumer))
        if word != "train":
            return word
        batch = self._found if self._ranks.is_first else next(self._consumer, None)
        if self._ranks.any(batch is None) or batch is None:
            return "stop"
        wait_s = time.monotonic() - started_s
        return Taken(batch, wait_s=wait_s, fill_s=wait_s)

    def _is_streamed(self) -> bool:
        """Whether the next batch is trained while it fills. A replayed batch repeats the parts that were trained
        before."""
        return self._consumer.step <= self._consumer.replayed_through or is_worth_streaming(self._times)

    def _take_parts(self, stream: BatchStream) -> Taken | str:
        """Add up the gradients of a batch's parts as they come, until the batch is whole."""
        parts, metrics, count = stream.parts(), LossMetrics(), 0
        started_s = time.monotonic()
        wait_s = fill_s = train_s = 0.0
        self._learner.begin()
        while True:
            asked_s = time.monotonic()
            word = self._ranks.lead(lambda: self._ask_part(stream, parts))
            if word == "again" and not self._ranks.is_first:
                with suppress(CorruptGroup):  # this rank also gives the batch up
                    next(parts)
            if word not in ("train", "whole"):
                return word
            part = self._found if self._ranks.is_first else next(parts, None)
            came_s = time.monotonic()
            wait_s += came_s - asked_s
            if word == "whole" and stream.batch is not None:
                metrics.rescale(stream.finish(self._learner.model.parameters()))
                return Taken(stream.batch, metrics, wait_s, fill_s, train_s, count)
            if self._ranks.any(part is None) or part is None:
                return "stop"
            fill_s, count = came_s - started_s, count + 1
            for piece, old_logprobs in self._learner.parts(part):
                if not self._learner.gradients(piece, metrics, old_logprobs, self._stop):
                    return "stop"
            train_s += time.monotonic() - came_s

    def _ask_part(self, stream: BatchStream, parts: Iterator[Batch]) -> str:
        """Like `_ask`; `whole` once all parts were trained."""
        word = self._ask(parts)
        return "whole" if word == "stop" and stream.batch is not None else word

    def _ask(self, batches: Iterator[Batch]) -> str:
        """Ask for the next batch or part on rank 0. Returns the next action of all ranks."""
        try:
            self._found = None
            self._found = next(batches)
        except StopIteration:
            return "stop"
        except SyncFirst as error:
            log.warning("%s", error)
            return "publish"
        except ProductionStalled as error:
            if not self._has_unsaved():
                raise
            log.warning("a checkpoint may free memory: %s", error)
            return "checkpoint"
        except ProductionStopped as error:
            self.ended = error
            return "end"
        except CorruptGroup as error:
            log.warning("step %d gets a new batch, and drops the gradients so far: %s", self._consumer.step, error)
            return "again"
        return "train"
