"""The reference GRPO trainer, in one process or in several ranks that share the model. Copy and adapt it.

A step is: claim -> gradients -> update -> publish -> commit -> checkpoint if due. After an interruption, training
resumes from the last checkpoint and repeats the steps after it on the same batches.

All ranks run the same steps, and make all calls that gather the model or sum gradients. Rank 0 leads: the others follow
the result of `Ranks.lead`, such as a request for weights before the next batch. If a rank fails, its process ends, and
the launcher ends the others.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rollq.buffer.errors import InvalidGroup, ServerError
from rollq.consumer.batches.batch import Batch
from rollq.consumer.claims.connection import Connection
from rollq.consumer.claims.epoch_start import wait_for_holder
from rollq.consumer.claims.stream import BatchStream
from rollq.consumer.consumer import Consumer
from rollq.consumer.losses.aggregation import averaged_over
from rollq.consumer.losses.custom import load_loss
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.production import describe_production
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trackers.trackers import check_packages
from rollq.consumer.trainer.changed_numbers import ChangedNumbers
from rollq.consumer.trainer.checkpoints import export_weights, save_checkpoint
from rollq.consumer.trainer.learner import Learner, start_learner
from rollq.consumer.trainer.metrics_files import cut
from rollq.consumer.trainer.observers import Observer, Update
from rollq.consumer.trainer.output_lock import locked
from rollq.consumer.trainer.ranks import Ranks, check_same, join_ranks
from rollq.consumer.trainer.recorded_run import BatchSource
from rollq.consumer.trainer.reports import reporting
from rollq.consumer.trainer.step_metrics import StepMetrics, describe_batch, likely_causes
from rollq.consumer.trainer.taking import BatchTaker, Taken
from rollq.consumer.trainer.user_functions import Priorities, Prioritizer, load_metric_function, load_priorities
from rollq.consumer.weights.sources import probe_of

log = logging.getLogger(__name__)

MAX_BAD_BATCHES = 3
"""Training stops after this many consecutive batches without a finite loss."""


def train(
    connection: Connection,
    settings: TrainerSettings,
    *,
    seed: int = 0,
    stop: threading.Event | None = None,
    observers: Sequence[Observer] = (),
) -> int:
    """Train from the newest checkpoint in `settings.output`, or from `settings.model`; returns the last trained step.

    Setting `stop` ends training between two micro-batches, with a checkpoint. `observers` receive the trainer's events
    after its reports. Raises `TrainerHeld` while another trainer holds the run, `FencedError` if one has taken over,
    `ClaimTimeout`, `HistoryGone`, `StoreLost`, `InvalidGroup` for unusable batches or logprobs, `ConfigError` if
    `settings.output` cannot be created or another trainer uses it.
    """
    stop = stop or threading.Event()
    check_packages(settings)
    priorities = load_priorities(settings.priorities)
    load_metric_function(settings.evaluation_metrics)  # before the slow load of the model
    if settings.loss.surrogate == "custom":
        load_loss(settings.loss.preset)
    with join_ranks(settings.device) as ranks:
        check_same(ranks, {**settings.model_dump(mode="json"), "run": connection.run, "seed": seed})
        with locked(settings.output) if ranks.is_first else nullcontext():
            if ranks.is_first:
                with connection.buffer() as buffer:
                    wait_for_holder(buffer, settings.consumer(), stop)  # before the slow load of the model
            ranks.gather(None)
            return _train(connection, settings, ranks, seed, stop, observers, priorities)


def _train(
    connection: Connection,
    settings: TrainerSettings,
    ranks: Ranks,
    seed: int,
    stop: threading.Event,
    observers: Sequence[Observer],
    priorities: Priorities | None,
) -> int:
    checkpoint, learner = start_learner(settings, seed, ranks)
    step = 0 if checkpoint is None else checkpoint.step
    if ranks.any(stop.is_set()):
        return step
    consumer = Consumer.connect(
        connection,
        weights=learner.start_weights(checkpoint),
        resume_from=step,
        lineage=None if checkpoint is None else checkpoint.lineage,
        probe=probe_of(learner.model),
        settings=settings.consumer(rank=ranks.rank, world_size=ranks.world_size, launch_id=ranks.launch_id, seed=seed),
        stop=stop,
    )
    if ranks.is_first:
        cut(settings.output, -1 if checkpoint is None else step)  # the initial weights are evaluated again
    prioritizers = [Prioritizer(priorities, consumer.prioritize)] if priorities else []
    with reporting(consumer, connection.run, settings, ranks, seed) as reports, consumer:
        heard_by = (*reports, *prioritizers, *observers)
        return Trainer(consumer, learner, settings, ranks, stop, heard_by, consumer.stream).run()


class Trainer:
    """Trains step after step until the last one."""

    def __init__(
        self,
        consumer: BatchSource,
        learner: Learner,
        settings: TrainerSettings,
        ranks: Ranks,
        stop: threading.Event,
        observers: Sequence[Observer] = (),
        stream: Callable[..., BatchStream] | None = None,
    ) -> None:
        """`stream` is the `stream` of a consumer whose batches may be trained while they fill."""
        self._consumer = consumer
        self._ranks = ranks
        self._learner = learner
        self._settings = settings
        self._stop = stop
        self._observers = observers
        self._metric_function = load_metric_function(settings.evaluation_metrics)
        self._bad_batches = 0
        self._trained = self._saved = self._published = consumer.step - 1
        self._taker = BatchTaker(
            consumer, learner, settings, ranks, stop, stream=stream, has_unsaved=lambda: self._trained > self._saved
        )

    def run(self) -> int:
        """Train until the last step or until stopped; returns the last trained step."""
        self._begin()
        while self._trained < self._settings.steps:
            taken = self._take()
            if taken is None or not self._train(taken):
                break
            if self._trained > self._saved and self._trained % self._settings.checkpoint_every == 0:
                self._checkpoint()
        self._checkpoint_the_rest()
        return self._trained

    def _begin(self) -> None:
        if self._saved:
            self._consumer.checkpoint(self._saved)  # a crash may have happened between saving and reporting it
        self._announce_weights(self._saved)
        if self._trained == 0 and self._settings.evaluate_at_start:
            self._evaluate(0)

    def _take(self) -> Taken | None:
        """The batch of the next step, None if stopped. Gradients of parts that were trained while it filled are
        accumulated.

        Publishes or saves a checkpoint if the batch waits for it.
        """
        while True:
            match self._taker.take():
                case "publish":
                    self._publish(self._trained)
                case "checkpoint":
                    self._checkpoint()
                case "end":
                    self._checkpoint_the_rest()
                    if self._taker.ended is not None:
                        raise self._taker.ended
                    return None
                case "stop":
                    return None
                case Taken() as taken:
                    return taken

    def _checkpoint_the_rest(self) -> None:
        if self._trained > self._saved:
            self._checkpoint()

    def _publish(self, step: int) -> int:
        """Publish the weights; returns the number of bytes stored for them."""
        weights = self._learner.weights(step)
        probe = probe_of(self._learner.model) if isinstance(weights, Path) else None  # a model's probe is computed
        stored_bytes = self._consumer.publish(weights, step=step, probe=probe)
        self._published = step
        self._announce_weights(step)
        return stored_bytes

    def _announce_weights(self, version: int) -> None:
        for observer in self._observers:
            observer.on_publish(self._consumer.epoch, version, self._learner.model)

    def _evaluate(self, step: int) -> None:
        """Evaluate the live weights if an evaluation is due."""
        settings = self._settings
        if not settings.evaluate_every or step % settings.evaluate_every:
            return
        metrics = self._consumer.evaluate(detailed=True, function=self._metric_function)
        if metrics:
            line = {"step": step, "version": self._published, "time_s": time.time(), **metrics}
            for observer in self._observers:
                observer.on_evaluation(line)

    def _tell(self, what: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            what(observer)

    def _train(self, taken: Taken) -> bool:
        """Train one step, without its checkpoint. Returns False if stopped: the batch stays claimed and is returned
        again."""
        batch, began_s = taken.batch, time.monotonic()
        self._tell(lambda observer: observer.on_batch(batch))
        norms = self._learn(taken)
        if norms is None:
            return False
        if not norms:
            self._quarantine(batch)
            return True
        self._bad_batches = 0
        update = self._updated(taken, norms)
        trained_s = time.monotonic()
        self._tell(lambda observer: observer.on_update(update))
        is_due = self._ranks.lead(lambda: batch.step % self._consumer.sync_weights_interval == 0)
        weights_bytes = self._publish(batch.step) if is_due else 0
        self._consumer.commit(batch)
        self._trained = batch.step
        train_s, publish_s = taken.train_s + trained_s - began_s, time.monotonic() - trained_s
        self._taker.note(taken, train_s)
        if self._ranks.is_first:
            seconds = {"wait_s": taken.wait_s, "train_s": train_s, "publish_s": publish_s}
            line = self._describe(update, taken, seconds, weights_bytes)
            self._tell(lambda observer: observer.on_step(line, batch))
        self._export(batch.step)
        self._evaluate(batch.step)
        return True

    def _learn(self, taken: Taken) -> list[float] | None:
        """Update the weights with a batch. Returns the gradient norms, empty if the first is not finite; None if
        stopped before."""
        norms = list[float]()
        if taken.parts:
            self._apply(taken.batch, taken.metrics, norms)
            return norms
        return norms if self._update(taken.batch, taken.metrics, norms) else None

    def _updated(self, taken: Taken, norms: list[float]) -> Update:
        return Update(
            batch=taken.batch,
            own=taken.metrics,
            metrics=StepMetrics.gather(taken.batch, taken.metrics, self._ranks),
            norms=norms,
            changed=self._before.share(self._ranks),
            learning_rate=self._learner.learning_rate(taken.batch.step),
        )

    def _describe(
        self, update: Update, taken: Taken, seconds: Mapping[str, float], weights_bytes: int
    ) -> dict[str, Any]:
        """A step's metrics line."""
        batch, total_s = update.batch, sum(seconds.values())
        produced = self._consumer.take_production()
        line = {
            **describe_batch(batch),
            "replayed": batch.step <= self._consumer.replayed_through,
            **update.metrics.result(),
            "gradient_norm": sum(update.norms) / len(update.norms),
            "learning_rate": update.learning_rate,
            "changed": update.changed,
            **({"updates": len(update.norms)} if self._settings.updates_per_batch > 1 else {}),
            **seconds,
            "idle": taken.wait_s / total_s,
            **({"streamed_parts": taken.parts, "fill_s": taken.fill_s} if taken.parts else {}),
            "weights_bytes": weights_bytes,
            "produced": {task: describe_production(production) for task, production in produced.items()},
        }
        return {**line, "tokens_per_s": line["tokens"] / total_s}

    def _update(self, batch: Batch, metrics: LossMetrics, norms: list[float]) -> bool:
        """Apply the gradients of each part of the batch until a gradient is not finite. Add their norms to `norms`.

        The loss in `metrics` becomes the mean over the updates, each weighted by its number of tokens or samples.
        Returns False if stopped before the first update.
        """
        total, weights = 0.0, 0
        for part, old_logprobs in self._learner.parts(batch):
            # after the first update, the batch is trained to its end: a checkpoint must have all of it or nothing
            stop = threading.Event() if norms else self._stop
            self._learner.begin()
            metrics.loss = 0.0
            if not self._learner.gradients(part, metrics, old_logprobs, stop):
                return False
            if not self._apply(batch, metrics, norms):
                break
            weight = averaged_over(part.counts, self._settings.loss.aggregation)
            total, weights = total + metrics.loss * weight, weights + weight
        metrics.loss = total / max(weights, 1)
        return True

    def _apply(self, batch: Batch, metrics: LossMetrics, norms: list[float]) -> bool:
        """Apply the gradients, and add their norm to `norms`. Returns False, without an update, if they are not
        finite."""
        is_finite = not self._ranks.any(not math.isfinite(metrics.loss))
        if is_finite and not norms:
            self._check_mismatch(batch.step, StepMetrics.gather(batch, metrics, self._ranks))
            self._before = ChangedNumbers(self._learner.model)
        norm = self._learner.update(batch.step) if is_finite else None
        if norm is None:
            if norms:
                log.error("step %d: update %d is not finite, and is skipped", batch.step, len(norms) + 1)
            return False
        norms.append(norm)
        return True

    def _check_mismatch(self, step: int, metrics: StepMetrics) -> None:
        total, most = metrics.mismatch.total(), self._settings.max_mismatch
        if total is not None and most is not None and total.mean > most:
            workers = metrics.mismatch.by()["worker"]
            worst = max(workers, key=lambda name: workers[name].mean)
            raise InvalidGroup(
                f"step {step}: logprobs differ from the engines' by {total.mean:.2g} nats on average, more than "
                f"max_mismatch = {most!r}, and worker {worst!r}'s by {workers[worst].mean:.2g}: "
                f"{likely_causes(metrics.loss.result()['on_policy_error'])}"
            )

    def _quarantine(self, batch: Batch) -> None:
        """Replace a batch whose loss or gradient is not finite. Its groups are kept as failed, for audit."""
        self._bad_batches += 1
        where = f"step {batch.step}: loss or gradient is not finite"
        if self._bad_batches >= MAX_BAD_BATCHES:
            raise InvalidGroup(
                f"{where}, for {self._bad_batches} batches in a row: check the weights and the learning rate; "
                "the batch stays claimed"
            )
        groups = ", ".join(f"{task}:{group_id}" for task, group_id in batch.group_ids)
        log.error("%s; its groups are quarantined, and the step gets a new batch: %s", where, groups)
        self._consumer.release(batch, "quarantine")

    def _export(self, step: int) -> None:
        """Export the weights of a step if an export is due."""
        settings, learner = self._settings, self._learner
        if settings.export_every and step % settings.export_every == 0:
            with self._consumer.saving():
                folder = export_weights(
                    settings.output,
                    step,
                    learner.model,
                    settings.model,
                    max_file_bytes=settings.max_file_bytes,
                    rank=self._ranks.rank,
                )
            log.info("step %d: exported the weights to %s", step, folder)

    def _checkpoint(self) -> None:
        settings, learner = self._settings, self._learner
        with self._consumer.saving():
            save_checkpoint(
                settings.output,
                self._trained,
                self._consumer.lineage,
                learner.model,
                learner.optimizer,
                settings.model,
                initial=learner.initial,
                kept=settings.keep_checkpoints,
                max_file_bytes=settings.max_file_bytes,
                with_optimizer=settings.save_optimizer,
                rank=self._ranks.rank,
            )
        self._ranks.gather(None)  # no rank may exit, which ends the launch, before the folder exists
        self._saved = self._trained
        try:
            self._consumer.checkpoint(self._trained)
        except ServerError as error:
            if not self._stop.is_set():
                raise
            log.warning("the checkpoint of step %d will be reported at the next start: %s", self._saved, error)
