"""The reference GRPO trainer: one process, one model, one update per batch. Copy it and change it.

A step is: claim -> gradients -> update -> publish -> commit -> checkpoint if it is due. After an interruption, training
resumes from the last checkpoint and repeats the steps after it on the same batches.
"""

import logging
import math
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np
import torch

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError, InvalidGroup, ProductionStalled, ProductionStopped, ServerError, SyncFirst
from rollq.buffer.image_processor import ImageProcessor, model_class
from rollq.buffer.log_once import LogOnce
from rollq.buffer.routed_experts import ROUTED_EXPERTS
from rollq.buffer.settings import PayloadSettings
from rollq.buffer.shards import task_of
from rollq.consumer.batch import Batch
from rollq.consumer.checkpoints import Checkpoint, load_optimizer, newest_checkpoint, save_checkpoint
from rollq.consumer.consumer import Consumer
from rollq.consumer.expert_replay import check_recorded, replay_experts, routers_of
from rollq.consumer.grpo import grpo_loss, token_logprobs
from rollq.consumer.images import ImageInputs
from rollq.consumer.metrics import LossMetrics
from rollq.consumer.metrics_files import EVALUATIONS_FILE, METRICS_FILE, append, cut
from rollq.consumer.micro_batch import MicroBatch
from rollq.consumer.output_lock import locked
from rollq.consumer.production import describe_production
from rollq.consumer.recorder import record_batch, record_weights
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer_lease import wait_for_holder
from rollq.consumer.weights.probe import probe_of

log = logging.getLogger(__name__)


def train(
    url: str,
    run: str,
    settings: TrainerSettings,
    *,
    password: str | None = None,
    payloads: PayloadSettings | None = None,
    seed: int = 0,
    stop: threading.Event | None = None,
) -> int:
    """Train from the newest checkpoint in `settings.output`, or from `settings.model`; returns the last trained step.

    Setting `stop` ends training between two micro-batches, with a checkpoint. Raises `TrainerHeld` while another
    trainer holds the run, `FencedError` if one has taken over, `ClaimTimeout`, `HistoryGone`, `StoreLost`,
    `InvalidGroup` for unusable batches or logprobs, `ConfigError` if `settings.output` cannot be created or another
    trainer uses it.
    """
    stop = stop or threading.Event()
    with locked(settings.output):
        with Buffer.connect(url, run, password=password) as buffer:
            wait_for_holder(buffer, settings.consumer, stop)  # before the model is loaded, which may take minutes
        return _train(url, run, settings, password=password, payloads=payloads, seed=seed, stop=stop)


def _train(
    url: str,
    run: str,
    settings: TrainerSettings,
    *,
    password: str | None,
    payloads: PayloadSettings | None,
    seed: int,
    stop: threading.Event,
) -> int:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(seed)
    checkpoint = newest_checkpoint(settings.output)
    learner = Learner(settings, checkpoint)
    consumer = Consumer.connect(
        url,
        run=run,
        weights=settings.model if checkpoint is None else checkpoint.folder,
        resume_from=0 if checkpoint is None else checkpoint.step,
        lineage=None if checkpoint is None else checkpoint.lineage,
        probe=probe_of(learner.model),
        settings=settings.consumer,
        password=password,
        payloads=payloads,
        stop=stop,
    )
    with consumer:
        cut(settings.output, -1 if checkpoint is None else checkpoint.step)  # the initial weights are evaluated again
        return Trainer(consumer, learner, settings, seed, stop).run()


class Learner:
    """The model and its optimizer: computes gradients of batches and applies them."""

    def __init__(self, settings: TrainerSettings, checkpoint: Checkpoint | None) -> None:
        self._settings = settings
        source = settings.model if checkpoint is None else checkpoint.folder
        self.model = _load_model(source, settings)
        if settings.replay_experts:
            routers_of(self.model)  # raises if it has none
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        if checkpoint is not None:
            load_optimizer(checkpoint.folder, self.model, self.optimizer)
        self._reference = _load_model(settings.model, settings) if settings.loss.kl_coefficient > 0 else None

    def gradients(self, batch: Batch, stop: threading.Event) -> LossMetrics | None:
        """Accumulate the gradients of all micro-batches; None if `stop` was set before the last one."""
        metrics = LossMetrics()
        self.optimizer.zero_grad()
        for micro in self._micro_batches(batch):
            if stop.is_set():
                return None
            micro = self._with_images(micro, batch).to(self._settings.device)
            reference_logprobs = self._reference_logprobs(micro)
            with self._routing(micro):
                loss = grpo_loss(
                    self.model, micro, self._settings.loss, reference_logprobs=reference_logprobs, metrics=metrics
                )
                loss.backward()  # type: ignore[no-untyped-call]
        return metrics

    def update(self) -> float | None:
        """Apply the clipped gradient and return its norm before clipping; None, without an update, if not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.gradient_clip))
        if not math.isfinite(norm):
            return None
        self.optimizer.step()
        return norm

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        padded, tokens = self._settings.layout == "padded", self._settings.micro_batch_tokens
        if not self._settings.replay_experts:
            return batch.micro_batches(tokens, padded=padded)
        check_recorded(batch)
        return batch.micro_batches(tokens, padded=padded, arrays=[ROUTED_EXPERTS])

    def _with_images(self, micro: MicroBatch, batch: Batch) -> MicroBatch:
        has_images = any(batch.groups[index].prompt.images for index in batch.share_groups)
        return self._images.add(micro, batch) if has_images else micro

    @cached_property
    def _images(self) -> ImageInputs:
        return ImageInputs(ImageProcessor(self._settings.model))

    def _routing(self, micro: MicroBatch) -> AbstractContextManager[None]:
        return replay_experts(self.model, micro) if self._settings.replay_experts else nullcontext()

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> torch.Tensor | None:
        return None if self._reference is None else token_logprobs(self._reference, micro).logprobs


class Trainer:
    """Trains step after step until the last one."""

    def __init__(
        self, consumer: Consumer, learner: Learner, settings: TrainerSettings, seed: int, stop: threading.Event
    ) -> None:
        self._consumer = consumer
        self._learner = learner
        self._settings = settings
        self._seed = seed
        self._stop = stop
        self._bad_batches = 0
        self._log_once = LogOnce(log)
        self._trained = self._saved = self._published = consumer.step - 1

    def run(self) -> int:
        """Train until the last step or until stopped; returns the last trained step."""
        if self._saved:
            self._consumer.checkpoint(self._saved)  # a crash may have come between saving it and reporting it
        self._record_weights(self._saved)
        if self._trained == 0:
            self._evaluate(0)
        while self._trained < self._settings.steps:
            batch, wait_s = self._next_batch()
            if batch is None or not self._train(batch, wait_s):
                break
            if self._trained > self._saved and self._trained % self._settings.checkpoint_every == 0:
                self._checkpoint()
        self._checkpoint_the_rest()
        return self._trained

    def _next_batch(self) -> tuple[Batch | None, float]:
        """The batch of the next step, None if stopped, and how long the last wait for it took, in seconds.

        Publishes, or saves a checkpoint, if that is what the batch lacks.
        """
        while True:
            started_s = time.monotonic()
            try:
                return next(self._consumer, None), time.monotonic() - started_s
            except SyncFirst as error:
                log.warning("%s", error)
                self._publish(self._trained)
            except ProductionStalled as error:
                if self._trained == self._saved:
                    raise
                log.warning("a checkpoint may free memory: %s", error)
                self._checkpoint()
            except ProductionStopped:
                self._checkpoint_the_rest()
                raise

    def _checkpoint_the_rest(self) -> None:
        if self._trained > self._saved:
            self._checkpoint()

    def _publish(self, step: int) -> int:
        """Publish the weights; returns the bytes that were stored for them."""
        stored_bytes = self._consumer.publish(self._learner.model)
        self._published = step
        self._record_weights(step)
        return stored_bytes

    def _evaluate(self, step: int) -> None:
        """Evaluate the live weights if it is time, and append the metrics to `EVALUATIONS_FILE`."""
        settings = self._settings
        if not settings.evaluate_every or step % settings.evaluate_every:
            return
        metrics = self._consumer.evaluate(timeout_s=settings.evaluation_timeout_s, detailed=True)
        if metrics:
            line = {"step": step, "version": self._published, "time_s": time.time(), **metrics}
            append(settings.output, EVALUATIONS_FILE, line)
            log.info("step %d: %s", step, ", ".join(f"{name} {value:.3f}" for name, value in metrics.items()))

    def _train(self, batch: Batch, wait_s: float) -> bool:
        """Train one step, without its checkpoint. False if stopped: the batch stays claimed and is returned again."""
        consumer, learner = self._consumer, self._learner
        arrived_s = time.monotonic()
        if truncation := find_truncation(batch):
            self._log_once.warning("truncation", "%s", truncation)
        metrics = learner.gradients(self._shuffled(batch), self._stop)
        if metrics is None:
            return False
        if is_finite := math.isfinite(metrics.loss):
            self._verify(batch, metrics)
        norm = learner.update() if is_finite else None
        if norm is None:
            self._quarantine(batch)
            return True
        self._bad_batches = 0
        trained_s = time.monotonic()
        if self._settings.record_dir is not None:
            record_batch(self._settings.record_dir, batch)
        is_due = batch.step % consumer.sync_weights_interval == 0
        weights_bytes = self._publish(batch.step) if is_due else 0
        consumer.commit(batch)
        self._trained = batch.step
        seconds = {
            "wait_s": wait_s,
            "train_s": trained_s - arrived_s,
            "publish_s": time.monotonic() - trained_s,
        }
        produced = {task: describe_production(production) for task, production in consumer.take_production().items()}
        facts = {**describe_batch(batch), "replayed": batch.step <= consumer.replayed_through}
        line = {
            **facts,
            **metrics.result(),
            "mismatch": describe_mismatch(batch, metrics),
            "gradient_norm": norm,
            **seconds,
            "weights_bytes": weights_bytes,
            "produced": produced,
        }
        self._report(line)
        self._evaluate(batch.step)
        return True

    def _shuffled(self, batch: Batch) -> Batch:
        """The batch to learn from; with `shuffle_rewards`, the rewards of its valid samples are permuted."""
        if not self._settings.shuffle_rewards:
            return batch
        rewards = batch.rewards.copy()
        rewards[batch.valid] = np.random.default_rng([self._seed, batch.step]).permutation(rewards[batch.valid])
        return batch.with_rewards(rewards)

    def _verify(self, batch: Batch, metrics: LossMetrics) -> None:
        limit = self._settings.verify_logprobs
        if limit is not None and metrics.on_policy_error > limit:
            raise InvalidGroup(
                f"step {batch.step}: logprobs of staleness 0 differ by up to {metrics.on_policy_error:.2g} from the "
                f"engine's, more than verify_logprobs = {limit!r}: weights, temperature or masks differ"
            )
        total, most = metrics.mismatch.total(), self._settings.max_mismatch
        if total is not None and most is not None and total.mean > most:
            workers = metrics.mismatch.by(batch)["worker"]
            worst = max(workers, key=lambda name: workers[name].mean)
            raise InvalidGroup(
                f"step {batch.step}: logprobs differ from the engines' by {total.mean:.2g} nats in the mean, more than "
                f"max_mismatch = {most!r}, and those of worker {worst!r} by {workers[worst].mean:.2g}: the engines "
                "serve other weights than they say, or the learning rate is far too high"
            )

    def _quarantine(self, batch: Batch) -> None:
        """Replace a batch whose loss or gradient is not finite; its groups are kept as failed, for audit."""
        self._bad_batches += 1
        where = f"step {batch.step}: loss or gradient is not finite"
        if self._bad_batches >= self._settings.max_bad_batches:
            raise InvalidGroup(
                f"{where}, for {self._bad_batches} batches in a row: check the weights and the learning rate; "
                "the batch stays claimed"
            )
        groups = ", ".join(f"{task}:{group_id}" for task, group_id in batch.group_ids)
        log.error("%s; its groups are quarantined, and the step gets another batch: %s", where, groups)
        self._consumer.release(batch, "quarantine")

    def _checkpoint(self) -> None:
        settings, learner = self._settings, self._learner
        with self._consumer.saving():
            save_checkpoint(
                settings.output, self._trained, self._consumer.lineage, learner.model, learner.optimizer, settings.model
            )
        self._saved = self._trained
        try:
            self._consumer.checkpoint(self._trained)
        except ServerError as error:
            if not self._stop.is_set():
                raise
            log.warning("the checkpoint of step %d will be reported at the next start: %s", self._saved, error)

    def _record_weights(self, version: int) -> None:
        if (folder := self._settings.record_dir) is not None:
            record_weights(folder, self._consumer.epoch, version, self._learner.model, self._settings.model)

    def _report(self, line: dict[str, Any]) -> None:
        append(self._settings.output, METRICS_FILE, line)
        self._consumer.report(line)
        log.info(
            "step %(step)d: reward %(reward).3f, loss %(loss).4f, %(tokens)d tokens, waited %(wait_s).2f s, "
            "trained %(train_s).2f s, published %(publish_s).2f s",
            line,
        )


def find_truncation(batch: Batch) -> str | None:
    """A warning if samples were drawn with top_p or top_k, which the trainer's logprobs do not include."""
    for sample in batch.share_samples:
        top_p, top_k = sample.sampling.get("top_p", 1.0), sample.sampling.get("top_k", 0)
        if top_p < 1 or top_k > 0:
            return (
                f"step {batch.step}: samples were drawn with top_p = {top_p}, top_k = {top_k}. Their behaviour "
                "logprobs are those of the truncated distribution, the trainer's are not, so importance ratios are too "
                "small. Use top_p = 1 and top_k = 0 for training, and other values only for evaluations"
            )
    return None


def describe_batch(batch: Batch) -> dict[str, Any]:
    """Describe a batch for the metrics of its step. `workers`: how many samples of the share each made."""
    group_tasks = [task_of(name) for name, _ in batch.group_ids]
    tasks = np.array([group_tasks[index] for index in batch.sample_groups])
    rewards = batch.rewards
    return {
        "step": batch.step,
        "time_s": time.time(),
        "reward": float(rewards[batch.valid].mean()) if batch.valid.any() else 0.0,
        "rewards": {
            str(task): float(rewards[chosen].mean())
            for task in sorted(set(tasks))
            if (chosen := batch.valid & (tasks == task)).any()
        },
        "groups": batch.counts.groups,
        "samples": batch.counts.samples,
        "prefetched": batch.prefetched,
        "workers": dict(Counter(str(sample.extra.get("worker", "?")) for sample in batch.share_samples)),
    }


def describe_mismatch(batch: Batch, metrics: LossMetrics) -> dict[str, Any]:
    """Describe how far the trainer's logprobs are from the engines', for the metrics of a step; see `Mismatch`."""
    total = metrics.mismatch.total()
    by = {
        f"by_{kind}": {name: asdict(one) for name, one in found.items()}
        for kind, found in metrics.mismatch.by(batch).items()
    }
    return {**({} if total is None else asdict(total)), **by}


def _load_model(folder: Any, settings: TrainerSettings) -> Any:
    """Load a model in `eval` mode: without dropout, its forward pass is that of the engines."""
    model: Any = model_class(folder).from_pretrained(folder, dtype=getattr(torch, settings.dtype))
    try:
        return model.to(settings.device).eval()
    except (RuntimeError, AssertionError) as error:  # torch asserts that it has CUDA
        raise ConfigError(f"trainer.device = {settings.device!r}: the model cannot be moved there: {error}") from error
