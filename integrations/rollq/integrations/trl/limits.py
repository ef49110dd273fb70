"""Pure: settings of TRL that the adapter cannot honour, and batches that a loss of TRL cannot be computed on."""

from typing import TYPE_CHECKING

import numpy as np

from rollq.buffer.errors import ConfigError, InvalidGroup
from rollq.consumer.batch import Batch

if TYPE_CHECKING:
    from trl import GRPOConfig

BY_TOKENS = ("dapo", "cispo")
"""Losses that divide by the loss tokens of the whole batch."""
BY_SAMPLES = ("grpo", "dr_grpo")
"""Losses that average over the rows of a micro-batch."""


def check_config(args: "GRPOConfig") -> None:
    """Raise `ConfigError` for the first setting that the adapter cannot honour."""
    losses = (*BY_TOKENS, *BY_SAMPLES)
    wanted = [
        ("max_steps", args.max_steps > 0, "it is the last train step, and must be positive"),
        ("loss_type", args.loss_type in losses, f"use one of {', '.join(losses)}: others depend on micro-batches"),
        ("num_iterations", args.num_iterations == 1, "it must be 1: a batch is trained with one update"),
        (
            "steps_per_generation",
            args.steps_per_generation == args.gradient_accumulation_steps,
            f"leave it out: a batch is one update of {args.gradient_accumulation_steps} micro-batches",
        ),
        ("use_vllm", not args.use_vllm, "leave it out: rollq's workers generate"),
        ("eval_strategy", args.eval_strategy == "no", "leave it out, and call `consumer.evaluate`"),
        ("entropy_coef", not args.entropy_coef, "leave it out: the bonus depends on micro-batches"),
        ("use_adaptive_entropy", not args.use_adaptive_entropy, "leave it out: the bonus depends on micro-batches"),
        ("save_strategy", args.save_strategy in ("no", "steps"), "set it to 'steps' or 'no': there are no epochs"),
        ("save_only_model", not args.save_only_model, "leave it out: to resume needs the optimizer's state"),
    ]
    for name, is_good, remedy in wanted:
        if not is_good:
            raise ConfigError(f"GRPOConfig {name} = {getattr(args, name)!r}: {remedy}")


def check_batch(batch: Batch, args: "GRPOConfig") -> None:
    """Raise `ConfigError` if the batch is that of another rank, and `InvalidGroup` for samples of several segments
    under a loss that needs them in one row."""
    mine = (args.process_index, args.world_size)
    if (batch.rank, batch.world_size) != mine:
        raise ConfigError(
            f"the consumer is that of rank {batch.rank} of {batch.world_size}, and TRL has rank {mine[0]} of "
            f"{mine[1]}: open it with `rollq.integrations.trl.connect`"
        )
    samples = batch.content.sequence_samples
    if (args.loss_type == "grpo" or args.importance_sampling_level == "sequence") and (
        len(np.unique(samples)) < len(samples)
    ):
        raise InvalidGroup(
            f"step {batch.step} has samples of several segments, and GRPOConfig loss_type = {args.loss_type!r} with "
            f"importance_sampling_level = {args.importance_sampling_level!r} treats each segment as a sample: set "
            "loss_type = 'dapo' and importance_sampling_level = 'token'"
        )
