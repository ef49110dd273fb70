"""`RollqGRPOTrainer`: TRL's GRPO trainer, with a rollq run's batches, weights and checkpoints.

A step is: claim -> gradients -> update -> publish -> commit -> checkpoint if it is due. TRL counts its steps as rollq
does: `state.global_step` is the last trained batch's step. A step is committed only after its update, and a checkpoint
is reported only once it is complete on disk.

TRL's generation, rewards and advantages, and their settings, are not used.
"""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from rollq.buffer.errors import ConfigError
from rollq.consumer import Consumer
from rollq.consumer.batches.response_lengths import Lengths, described_lengths, response_lengths
from rollq.consumer.batches.worker_shares import described, samples_by_worker
from rollq.consumer.trainer.step_metrics import describe_batch
from rollq.integrations.trl.checkpoints import begin, finish, folder_of
from rollq.integrations.trl.connecting import ranks_of
from rollq.integrations.trl.feed import Feed
from rollq.integrations.trl.inputs import LOSS_SCALE
from rollq.integrations.trl.installed import check_installed
from rollq.integrations.trl.limits import check_config
from rollq.integrations.trl.progress import Progress

check_installed()

from accelerate.utils import is_peft_model  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_utils import rotate_checkpoints  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

log = logging.getLogger(__name__)


class RollqGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` on batches of a `Consumer`.

    `model` and `args` are TRL's, and `model` is the initial model even when training resumes. `consumer` is open, and
    comes from `connect`. A batch is one update of `args.gradient_accumulation_steps` micro-batches of at most
    `max_tokens` tokens, padding included; the batch sizes in `args` have no effect. Ratios are against the engine's
    logprobs.

    Raises `ConfigError` for TRL settings that it cannot honour.
    """

    def __init__(
        self,
        model: Any,
        args: GRPOConfig,
        consumer: Consumer,
        *,
        max_tokens: int,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        check_config(args)
        args.ignore_data_skip = True  # the consumer decides which batch is next
        self._consumer = consumer
        self._ranks = ranks_of(args)
        super().__init__(
            model=model,
            reward_funcs=_is_scored_already,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [""]}),  # TRL needs one
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self._check_model()
        self._saved_step = consumer.step - 1
        self._feed = Feed(
            consumer,
            self._ranks,
            args,
            max_tokens=max_tokens,
            publish=lambda: self._publish(consumer.step - 1),
            can_save=self._can_save,
            save=self._save_now,
        )
        self.add_callback(Progress(self._feed, end_step=self._end_step, can_save=self._can_save))

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train until `args.max_steps`, from the checkpoint of the step that the consumer resumes from.

        Returns TRL's output. Raises `ConfigError` if `args.output_dir` lacks that checkpoint, or another one is
        requested; `InvalidGroup` when a gradient is not finite; and the exceptions of `next(consumer)`.
        """
        step = self._consumer.step - 1
        folder = folder_of(Path(self.args.output_dir), step) if step else None
        if isinstance(resume_from_checkpoint, str) and (folder is None or Path(resume_from_checkpoint) != folder):
            raise ConfigError(
                f"resume_from_checkpoint = {resume_from_checkpoint!r}: the consumer resumes from step {step}; leave it "
                "out, and open the consumer with `rollq.integrations.trl.connect`"
            )
        if folder is not None:
            if not folder.is_dir():
                raise ConfigError(f"the consumer resumes from step {step}, and {str(folder)!r} does not exist")
            self._consumer.checkpoint(step)  # a crash may have happened between saving it and reporting it
        output = super().train(None if folder is None else str(folder), **kwargs)
        if self._feed.error is not None:
            raise self._feed.error
        return output

    def get_train_dataloader(self) -> Any:
        """The consumer's batches. Accelerate does not prepare this loader: Accelerate would read ahead, and divide
        batches among ranks."""
        return self._feed

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """This micro-batch's part of the whole batch's loss, as TRL computes it."""
        return super().compute_loss(model, inputs, *args, **kwargs) * inputs[LOSS_SCALE]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Move the inputs to the device, instead of generating them."""
        inputs = Trainer._prepare_inputs(self, generation_batch)
        if self.beta:
            inputs["ref_per_token_logps"] = self._reference_logprobs(inputs)
        return inputs

    @torch.no_grad()
    def _reference_logprobs(self, inputs: Any) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].shape[1]
        logprobs: torch.Tensor
        logprobs, *_ = self._get_per_token_logps_and_entropies(self.ref_model, ids, attention_mask, width)
        return logprobs

    def _publish(self, step: int) -> None:
        self._consumer.publish(self.accelerator.unwrap_model(self.model), step=step)

    def _end_step(self) -> None:
        """Publish the updated weights if a publication is due, and commit."""
        batch = self._feed.batch
        assert batch is not None
        made, lengths = Counter[str](), list[Lengths]()
        measured = [samples_by_worker(batch), response_lengths(batch)]
        for counted, of_rank in self._ranks.gather(measured):  # from here on, no rank may fail in this step
            made.update(counted)
            lengths.append(of_rank)
        if batch.step % self._consumer.sync_weights_interval == 0:
            self._publish(batch.step)
        self._consumer.commit(batch)
        facts = describe_batch(batch)
        self._metrics["train"]["reward"].append(facts["reward"])
        self._metrics["train"]["rollq/wait_s"].append(self._feed.wait_s)
        self._consumer.report({**facts, **described(made), **described_lengths(lengths), "wait_s": self._feed.wait_s})

    def _can_save(self) -> bool:
        return bool(self.args.save_strategy != "no" and self.state.global_step > self._saved_step)

    def _save_now(self) -> None:
        self._save_checkpoint(self.model_wrapped, None)
        self.callback_handler.on_save(self.args, self.state, self.control)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save TRL's checkpoint, and report it when all ranks' files are on disk. Only then may old checkpoints be
        removed."""
        step, limit = self.state.global_step, self.args.save_total_limit
        folder = folder_of(Path(self.args.output_dir), step)
        if self._ranks.is_first:
            begin(folder)
        self.args.save_total_limit = None
        try:
            with self._consumer.saving():
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self._ranks.gather(None)
        if self._ranks.is_first:
            finish(folder, step, self._consumer.lineage)
            rotate_checkpoints(output_dir=self.args.output_dir, save_total_limit=limit)
        self._ranks.gather(None)  # a rank that ends sooner could get the others killed
        self._saved_step = step
        self._consumer.checkpoint(step)

    def _check_model(self) -> None:
        """Raise `ConfigError` for a model that cannot be published, or whose loss depends on micro-batches."""
        plugin = self.args.deepspeed_plugin
        if is_peft_model(self.model):
            raise ConfigError("rollq.integrations.trl publishes whole models: pass one without a PEFT adapter")
        if plugin is not None and plugin.zero_stage == 3:
            raise ConfigError(
                "DeepSpeed's ZeRO stage 3 divides the weights, which cannot be published: use stage 1 or 2"
            )
        if self.aux_loss_enabled:
            raise ConfigError(
                f"GRPOConfig router_aux_loss_coef = {self.args.router_aux_loss_coef!r}: set it to 0: the balancing "
                "loss of a mixture of experts depends on micro-batches"
            )
        for dtype in sorted(_small_dtypes(self.model)):
            log.warning(
                "the model has weights in %s, whose updates are rounded away at small learning rates: load it in "
                "float32, and set bf16=True in GRPOConfig for passes in bfloat16",
                dtype.removeprefix("torch."),
            )


def _is_scored_already(**_: Any) -> list[float]:
    raise NotImplementedError("rollq's workers have scored the samples")


def _small_dtypes(model: Any) -> set[str]:
    """The dtypes of trained weights that round away updates at a small learning rate."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return {str(parameter.dtype) for parameter in trained if parameter.element_size() < 4}
