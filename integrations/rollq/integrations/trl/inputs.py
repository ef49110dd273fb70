"""Converts rollq's micro-batches to inputs of TRL's loss. Needs torch.

Invariant: however a batch is split into micro-batches and over ranks, its gradient is the same. TRL's losses divide by
the counts in these inputs, and `Trainer` averages over ranks.
"""

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from rollq.buffer.errors import ConfigError, InvalidGroup
from rollq.consumer.batches.micro_batch import MicroBatch
from rollq.integrations.trl.limits import BY_SAMPLES

if TYPE_CHECKING:
    from trl import GRPOConfig

LOSS_SCALE = "rollq_loss_scale"
"""The input that multiplies TRL's loss."""


def grpo_inputs(micro: MicroBatch, args: "GRPOConfig", step: int) -> dict[str, torch.Tensor]:
    """The inputs of `GRPOTrainer` for a padded micro-batch of B rows. Its columns are split before the first loss
    token, into prompt [B, P] and completion [B, T - P].

    The old logprobs are the engine's. Raises `ConfigError` if the temperature differs from TRL's, and `InvalidGroup`
    for samples without logprobs or with images.
    """
    _check(micro, args, step)
    assert micro.attention_mask is not None
    mask = micro.loss_mask
    columns = mask.any(dim=0).nonzero()
    start = int(columns[0]) if len(columns) else 1
    width = max(mask.shape[1], start + 1)  # a blank micro-batch has one token, and TRL needs a completion

    def completion(tensor: torch.Tensor) -> torch.Tensor:
        return pad(tensor, (0, width - tensor.shape[1]))[:, start:]

    return {
        "prompt_ids": micro.input_ids[:, :start],
        "prompt_mask": micro.attention_mask[:, :start],
        "completion_ids": completion(micro.input_ids),
        "completion_mask": completion(micro.attention_mask),
        "tool_mask": completion(mask.long()),
        "old_per_token_logps": completion(micro.behaviour_logprobs),
        "advantages": completion(micro.advantages),
        "num_items_in_batch": torch.tensor(float(micro.counts.loss_tokens)),
        LOSS_SCALE: torch.tensor(_scale(micro, args)),
    }


def _scale(micro: MicroBatch, args: "GRPOConfig") -> float:
    """The factor that turns TRL's mean over rows, micro-batches and ranks into a mean over the batch's samples."""
    if args.loss_type not in BY_SAMPLES:
        return 1.0
    rows = micro.input_ids.shape[0]
    return float(rows * args.gradient_accumulation_steps * args.world_size / max(micro.counts.samples, 1))


def _check(micro: MicroBatch, args: "GRPOConfig", step: int) -> None:
    found = micro.temperature[micro.loss_mask]
    other = found[(found - args.temperature).abs() > 1e-6]
    if len(other):
        raise ConfigError(
            f"step {step} has samples of temperature {other[0].item():g}, but GRPOConfig temperature = "
            f"{args.temperature!r}: TRL has one temperature for all samples, so set it to the temperature of all tasks"
        )
    if micro.behaviour_logprobs[micro.loss_mask].isnan().any():
        raise InvalidGroup(
            f"step {step} has samples that were inserted without logprobs, and TRL's losses compare with them: insert "
            "samples with logprobs, or train with `rollq train`"
        )
    if micro.lacks_images:
        raise InvalidGroup(f"step {step} has images in its prompts, which rollq.integrations.trl does not pass to TRL")
