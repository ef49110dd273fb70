"""A trainer's warnings about its batches, once per kind."""

import logging
from collections.abc import Mapping

import numpy as np

from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.rules.shards import task_of
from rollq.consumer.batches.batch import Batch
from rollq.consumer.objective.policy_loss import ABSENT_REMEDY
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.changed_numbers import LEAST_SHARE
from rollq.consumer.trainer.observers import Observer, Update

log = logging.getLogger(__name__)


class BatchWarnings(Observer):
    """Logs faults of batches that do not stop the trainer."""

    def __init__(self, settings: TrainerSettings, *, on: bool = True) -> None:
        """Without `on`, updates are not checked. Every rank checks the samples in its share."""
        self._on = on
        self._settings = settings
        self._log_once = LogOnce(log)

    def on_batch(self, batch: Batch) -> None:
        """Warn about samples without a learning signal or with a wrong one."""
        if truncation := find_truncation(batch):
            self._log_once.warning("truncation", "%s", truncation)
        idle = find_idle_tasks(batch) if self._settings.credit == "sample" else []
        for task in set(idle) - set(self._settings.loss.components):
            self._log_once.warning(
                f"idle {task}",
                "step %d: within each inserted group of task %r, all rewards are equal, so all advantages are 0, and "
                "nothing is learned: insert responses with different rewards, or name the task in sft of "
                "[trainer.loss] to imitate it",
                batch.step,
                task,
            )

    def on_update(self, update: Update) -> None:
        """Warn about tokens that were left out, and about weights that hardly change."""
        if self._on:
            step = update.batch.step
            self._left_out(step, update.metrics.loss.left_out)
            self._changed(step, update.changed, learning_rate=update.learning_rate, gradient_norm=update.norms[0])

    def _changed(self, step: int, share: float, *, learning_rate: float, gradient_norm: float) -> None:
        """Warn about a step that changed less than `LEAST_SHARE` of the trained numbers."""
        if share >= LEAST_SHARE:
            return
        cause = (
            f"updates of about learning_rate = {learning_rate:g} are rounded away: raise it in [trainer]"
            if gradient_norm
            else "the gradient is 0: all advantages are 0, or no token is trained"
        )
        self._log_once.warning(
            f"changed {not gradient_norm}",
            "step %d changed only %.2g %% of the trained numbers (changed in the metrics); %s",
            step,
            100 * share,
            cause,
        )

    def _left_out(self, step: int, tokens: Mapping[str, int]) -> None:
        """Warn about loss tokens, by task, that a step left out because they have no logprobs."""
        for task, number in sorted(tokens.items()):
            self._log_once.warning(
                f"without logprobs {task}",
                "step %d: samples of task %r were inserted without logprobs, which the loss needs; it leaves out "
                "these %d tokens, and such samples of later steps (without_logprobs in the metrics): %s",
                step,
                task,
                number,
                ABSENT_REMEDY,
            )


def find_truncation(batch: Batch) -> str | None:
    """Return a warning if samples were drawn with top_p or top_k, which the trainer's logprobs ignore."""
    for sample in batch.share_samples:
        top_p, top_k = sample.sampling.get("top_p", 1.0), sample.sampling.get("top_k", 0)
        if top_p < 1 or top_k > 0:
            return (
                f"step {batch.step}: samples were drawn with top_p = {top_p}, top_k = {top_k}. Their behaviour "
                "logprobs follow the truncated distribution, but the trainer's logprobs do not, so importance ratios "
                "are too small. Use top_p = 1 and top_k = 0 for training, and other values only for evaluations"
            )
    return None


def find_idle_tasks(batch: Batch) -> list[str]:
    """Tasks whose inserted groups in the share all lack an advantage: a loss that multiplies by advantages learns
    nothing from them."""
    largest: dict[str, float] = {}
    for index in batch.share_groups:
        group = batch.groups[index]
        if any(sample.is_inserted for sample in group.samples):
            task = task_of(group.task)
            size = float(np.abs(batch.advantages[batch.sample_groups == index]).max())
            largest[task] = max(largest.get(task, 0.0), size)
    return [task for task, size in largest.items() if not size]
