"""The learner of the reference trainer: a model, its optimizer, and the gradients of a batch."""

import math
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

from rollq.buffer.errors import ConfigError
from rollq.buffer.image_processor import ImageProcessor, model_class
from rollq.buffer.routed_experts import ROUTED_EXPERTS
from rollq.consumer.batch import Batch
from rollq.consumer.checkpoints import Checkpoint, load_optimizer, newest_checkpoint
from rollq.consumer.expert_replay import check_recorded, replay_experts, routers_of
from rollq.consumer.grpo import check_logprobs, grpo_loss, token_logprobs
from rollq.consumer.images import ImageInputs
from rollq.consumer.metrics import LossMetrics
from rollq.consumer.micro_batch import MicroBatch
from rollq.consumer.settings import TrainerSettings


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
        """Accumulate the gradients of all micro-batches; None if `stop` was set before the last one.

        Raises `InvalidGroup` for inserted samples without the logprobs that the loss needs.
        """
        check_logprobs(batch, self._settings.loss)
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


def start_learner(settings: TrainerSettings, seed: int) -> tuple[Checkpoint | None, Learner]:
    """The newest checkpoint, and a learner that starts from it, or from the model."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(seed)
    checkpoint = newest_checkpoint(settings.output)
    return checkpoint, Learner(settings, checkpoint)


def _load_model(folder: Any, settings: TrainerSettings) -> Any:
    """Load a model in `eval` mode: without dropout, its forward pass is that of the engines."""
    model: Any = model_class(folder).from_pretrained(folder, dtype=getattr(torch, settings.dtype))
    try:
        return model.to(settings.device).eval()
    except (RuntimeError, AssertionError) as error:  # torch asserts that it has CUDA
        raise ConfigError(f"trainer.device = {settings.device!r}: the model cannot be moved there: {error}") from error
