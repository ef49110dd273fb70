"""The learner of the reference trainer: a model, its optimizer, and the gradients of a batch."""

import math
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as run_again

from rollq.buffer.errors import ConfigError
from rollq.buffer.images.processor import ImageProcessor, model_class
from rollq.buffer.values.routed_experts import ROUTED_EXPERTS
from rollq.consumer.batches.batch import Batch
from rollq.consumer.batches.image_inputs import ImageInputs
from rollq.consumer.batches.micro_batch import MicroBatch
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.objective.policy_loss import OtherLogprobs, leave_out_absent, policy_loss
from rollq.consumer.objective.precision import computing_in
from rollq.consumer.objective.teacher import teacher_logprobs, teacher_top_logprobs
from rollq.consumer.objective.token_logprobs import check_chunks, token_logprobs
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.checkpoints import Checkpoint, load_optimizer, newest_checkpoint, step_name
from rollq.consumer.trainer.expert_replay import check_recorded, replay_experts, routers_of
from rollq.consumer.trainer.initial_model import check_initial, check_kind, initial_digest
from rollq.consumer.trainer.learning_rate import learning_rate
from rollq.consumer.trainer.lora import add_adapter, load_adapter, save_adapter, without_adapter
from rollq.consumer.trainer.ranks import Ranks
from rollq.consumer.trainer.sharding import decoder_layers, reshard, shard, whole_number
from rollq.consumer.weights.sources import Weights

OldLogprobs = Sequence[torch.Tensor]
"""For each micro-batch of a batch, the old logprobs of its loss tokens, float32 [n], in nats."""


class Learner:
    """The model and its optimizer: computes gradients of batches and applies them. All ranks make the same calls."""

    def __init__(
        self, settings: TrainerSettings, checkpoint: Checkpoint | None, ranks: Ranks, *, initial: str | None = None
    ) -> None:
        """`initial` is the digest of the weights in `settings.model`, for checkpoints."""
        self.initial = initial
        self._settings = settings
        self._ranks = ranks
        newest = settings.model if checkpoint is None or settings.lora else checkpoint.folder
        self.model = _load(newest, settings, ranks, is_trained=True)
        compute = settings.compute_in
        self._compute_dtype = None if compute == "float32" or ranks.are_several else getattr(torch, compute)
        if settings.replay_experts:
            routers_of(self.model)  # raises if the model has none
        if settings.logprob_chunk:
            check_chunks(self.model)
            reshard(self.model)
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
        )
        if checkpoint is not None:
            if settings.lora:
                load_adapter(checkpoint.folder, self.model)
            load_optimizer(checkpoint.folder, self.model, self.optimizer)
        needs_reference = settings.loss.kl_coefficient > 0
        needs_other = needs_reference and not settings.lora
        self._reference = _load(settings.model, settings, ranks, is_trained=False) if needs_other else None

    def start_weights(self, checkpoint: Checkpoint | None) -> Weights:
        """The weights that this trainer starts with: a folder, or the model if it is rounded. All ranks call it."""
        if self._settings.lora or self._settings.consumer().publish_dtype:
            return self.weights(0 if checkpoint is None else checkpoint.step)
        return self._settings.model if checkpoint is None else checkpoint.folder

    def weights(self, step: int) -> Weights:
        """The weights to publish after `step`: the model, or the folder of its adapter.

        All ranks call it. It removes the folders of old adapters.
        """
        if self._settings.lora is None:
            model: Weights = self.model
            return model
        adapters = self._settings.output / "adapters"
        folder = adapters / step_name(step)
        save_adapter(folder, self.model, rank=self._ranks.rank, dtype=self._settings.dtype)
        if self._ranks.is_first:
            _remove_old(folder, self._settings.keep_versions)
        return folder

    def parts(self, batch: Batch) -> list[tuple[Batch, OldLogprobs | None]]:
        """The parts of a batch, one for each update, with the logprobs of the weights before the first update.

        The logprobs are None if they are the current weights', or if the loss does not use recomputed logprobs. Raises
        `ConfigError` for fewer groups than updates, and, unless `credit` is `sample`, the exceptions of
        `Batch.with_credit`.
        """
        self._check_images(batch)
        settings = self._settings
        if settings.credit != "sample":
            batch = batch.with_credit(settings.credit, discount=settings.discount, without=settings.loss.components)
        parts = batch.split(settings.updates_per_batch)
        if len(parts) == 1 or self._settings.loss.old_logprobs == "behaviour":
            return [(part, None) for part in parts]
        return [(part, self._old_logprobs(part)) for part in parts]

    def begin(self) -> None:
        """Drop the gradients so far."""
        self.optimizer.zero_grad()

    def gradients(
        self, batch: Batch, metrics: LossMetrics, old_logprobs: OldLogprobs | None, stop: threading.Event
    ) -> bool:
        """Add the gradients of all micro-batches. Returns False if `stop` was set on a rank before the last of them.

        Inserted samples without the logprobs that the loss needs are left out and counted. Raises `InvalidGroup` for
        samples that lack needed teacher logprobs; `ConfigError` for images on several ranks.
        """
        self._check_images(batch)
        for index, (micro, left_out) in enumerate(self._micro_batches(batch)):
            metrics.leave_out(left_out)
            if self._ranks.any(stop.is_set()):
                return False
            micro = self._on_device(micro, batch)
            with computing_in(self.model, self._compute_dtype), self._routing(micro):
                loss = policy_loss(
                    self.model,
                    micro,
                    self._settings.loss,
                    others=OtherLogprobs(
                        old=None if old_logprobs is None else old_logprobs[index],
                        reference=self._reference_logprobs(micro),
                        **self._taught(batch, micro),
                    ),
                    chunk=self._settings.logprob_chunk,
                    metrics=metrics,
                )
                loss.backward()  # type: ignore[no-untyped-call]
        return True

    def update(self, step: int) -> float | None:
        """Apply the clipped gradient with the learning rate of `step`. Returns the gradient's norm before clipping.

        Returns None, without an update, if the norm is not finite.
        """
        norm = whole_number(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.gradient_clip))
        if not math.isfinite(norm):
            return None
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.optimizer.step()
        return norm

    def learning_rate(self, step: int) -> float:
        """The learning rate of `step`."""
        settings = self._settings
        return learning_rate(
            step,
            largest=settings.learning_rate,
            schedule=settings.schedule,
            warmup_steps=settings.warmup_steps,
            steps=settings.steps,
        )

    def _micro_batches(self, batch: Batch) -> list[tuple[MicroBatch, Counter[str]]]:
        """The micro-batches without samples that lack logprobs, and each one's number of removed tokens, by task."""
        arrays = [ROUTED_EXPERTS] if self._settings.replay_experts else []
        if arrays:
            check_recorded(batch)
        try:
            micro_batches = batch.micro_batches(
                self._settings.micro_batch_tokens,
                padded=self._settings.layout == "padded",
                arrays=arrays,
                whole_samples=self._settings.loss.needs_whole_samples,
            )
        except ConfigError as error:
            raise ConfigError(f"step {batch.step}: {error}; max_tokens is micro_batch_tokens in [trainer]") from None
        return leave_out_absent(batch, micro_batches, self._settings.loss)

    def _on_device(self, micro: MicroBatch, batch: Batch) -> MicroBatch:
        return (self._images.add(micro, batch) if _has_images(batch) else micro).to(self._settings.device)

    def _check_images(self, batch: Batch) -> None:
        """Raise `ConfigError` on all ranks if a part of the batch has images and there are several ranks.

        A rank without images would skip the layers that read images, and the other ranks would wait for its gradients.
        """
        if self._ranks.are_several and self._ranks.any(_has_images(batch)):
            raise ConfigError(
                f"step {batch.step} has images in its prompts, which `rollq train` trains on in one process only: "
                "start it without --ranks; the batch stays claimed"
            )

    @cached_property
    def _images(self) -> ImageInputs:
        return ImageInputs(ImageProcessor(self._settings.model))

    def _routing(self, micro: MicroBatch) -> AbstractContextManager[None]:
        return replay_experts(self.model, micro) if self._settings.replay_experts else nullcontext()

    def _old_logprobs(self, batch: Batch) -> OldLogprobs:
        logprobs = []
        for micro, _ in self._micro_batches(batch):
            micro = self._on_device(micro, batch)
            with computing_in(self.model, self._compute_dtype), self._routing(micro):
                logprobs.append(self._logprobs(self.model, micro))
        reshard(self.model)
        return logprobs

    def _taught(self, batch: Batch, micro: MicroBatch) -> dict[str, Any]:
        """The teacher logprobs that the loss needs, by field of `OtherLogprobs`."""
        loss = self._settings.loss
        if not loss.distillation:
            return {}
        if loss.distilled_tokens == "top_k":
            vocabulary = self.model.config.get_text_config().vocab_size
            return {"teacher_top": teacher_top_logprobs(batch, micro, loss.distillation, vocabulary=vocabulary)}
        return {"teacher": teacher_logprobs(batch, micro, loss.distillation)}

    def _reference_logprobs(self, micro: MicroBatch) -> torch.Tensor | None:
        """The logprobs of the initial model, which an adapter leaves unchanged; None if the loss needs none."""
        if self._settings.loss.kl_coefficient == 0:
            return None
        if self._reference is not None:
            logprobs = self._logprobs(self._reference, micro)
            reshard(self._reference)
            return logprobs
        with without_adapter(self.model):
            return self._logprobs(self.model, micro)

    @torch.no_grad()
    def _logprobs(self, model: Any, micro: MicroBatch) -> torch.Tensor:
        return token_logprobs(model, micro, chunk=self._settings.logprob_chunk).logprobs


def start_learner(settings: TrainerSettings, seed: int, ranks: Ranks) -> tuple[Checkpoint | None, Learner]:
    """Return the newest checkpoint, and a learner that starts from it or else from the model.

    Raises `ConfigError` if ranks find different checkpoints, or if the checkpoint needs another model; `WeightsError`
    for a checkpoint of another model.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(seed)
    newest = newest_checkpoint(settings.output)
    everywhere = ranks.gather(None if newest is None else [newest.step, newest.lineage])
    if everywhere[ranks.rank] != everywhere[0]:
        raise ConfigError(
            f"[trainer] output = {str(settings.output)!r}: rank {ranks.rank} finds a different newest checkpoint "
            "there than rank 0: all machines must share this folder"
        )
    initial = initial_digest(settings.model, ranks)
    if newest is not None:
        check_kind(newest, settings)
        check_initial(newest, initial, settings, ranks)
        initial = newest.initial or initial
    return newest, Learner(settings, newest, ranks, initial=initial)


def _has_images(batch: Batch) -> bool:
    """Whether the groups of this rank have images in their prompts."""
    return any(batch.groups[index].prompt.images for index in batch.share_groups)


def _load(folder: Path, settings: TrainerSettings, ranks: Ranks, *, is_trained: bool) -> Any:
    """A folder's model in `eval` mode: without dropout, its forward pass equals the engines'.

    Parameters to train are float32: the model's or, with `lora` in the settings, the new adapter's. With several ranks,
    the model is sharded layer by layer on its way to the device. The ranks of one machine load it one after another.
    """
    if not ranks.are_several:
        return _moved(_read(folder, settings, is_trained=is_trained), settings)
    compute = None if settings.compute_in == "float32" else getattr(torch, settings.compute_in)
    for is_our_turn in ranks.take_turns():
        if is_our_turn:
            model = _read(folder, settings, is_trained=is_trained)
            shard(model, world_size=ranks.world_size, device=settings.device, compute_dtype=compute)
    return model


def _remove_old(newest: Path, keep: int) -> None:
    """Remove the adapter folders beside the newest, except the last `keep` before it."""
    folders = sorted(newest.parent.glob("step-" + "[0-9]" * 8))  # without renamed copies
    undone = [path for path in folders if path > newest]  # of steps after the checkpoint that training resumed from
    for old in undone + [path for path in folders if path <= newest][: -keep - 1]:
        shutil.rmtree(old)


def _read(folder: Path, settings: TrainerSettings, *, is_trained: bool) -> Any:
    is_frozen = not is_trained or settings.lora is not None
    dtype = getattr(torch, settings.dtype if is_trained else settings.compute_in) if is_frozen else torch.float32
    model: Any = model_class(folder).from_pretrained(folder, dtype=dtype)
    if is_trained and settings.lora is not None:
        add_adapter(model, settings.lora)
    for layer in decoder_layers(model) if settings.checkpoint_activations else ():
        layer.forward = partial(run_again, layer.forward, use_reentrant=False)
    return model.eval()


def _moved(model: Any, settings: TrainerSettings) -> Any:
    try:
        return model.to(settings.device)
    except (RuntimeError, AssertionError) as error:  # raised by torch without CUDA
        raise ConfigError(f"trainer.device = {settings.device!r}: the model cannot be moved there: {error}") from error
