"""The GRPO family of losses on a micro-batch. Needs torch.

Invariant: each token's weight depends on the counts of the whole batch, so the gradient does not depend on how the
batch was split into micro-batches and among ranks. Ranks combine theirs as `ConsumerSettings.reduction` says: they sum
them (`sum_gradients`), or average them, as DDP and FSDP do.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rollq.buffer.errors import ConfigError, InvalidGroup
from rollq.consumer.batch import Batch
from rollq.consumer.metrics import LossMetrics
from rollq.consumer.micro_batch import MicroBatch
from rollq.consumer.settings import GrpoSettings
from rollq.consumer.token_logprobs import token_logprobs


def grpo_loss(
    model: Any,
    micro: MicroBatch,
    settings: GrpoSettings | None = None,
    *,
    old_logprobs: torch.Tensor | None = None,
    reference_logprobs: torch.Tensor | None = None,
    chunk: int = 0,
    metrics: LossMetrics | None = None,
) -> torch.Tensor:
    """Compute the micro-batch's part of the batch's loss, a scalar, times `micro.loss_scale`.

    The parts of all micro-batches of a rank add up. Those of the ranks do, too, or have the batch's loss as their mean,
    as the consumer's `reduction` says.

    `old_logprobs` float32 [n] are, with `settings.old_logprobs = "recomputed"`, those of the weights before the first
    update on this batch (default: the current ones, which is right for one update per batch). `reference_logprobs`
    float32 [n] are those of the reference model, required if `settings.kl_coefficient` > 0. Both are ordered as in
    `token_logprobs`, which explains `chunk`. `metrics`, if given, is updated.

    Raises `ConfigError` if the reference logprobs are missing, and `InvalidGroup` if inserted samples have no logprobs
    and `settings.absent_logprobs` is `refuse`.

    The surrogate is PPO's clipped one (Schulman et al. 2017, arXiv:1707.06347); the KL is the k3 estimator
    exp(d) - d - 1 with d = reference - new (Schulman 2020, "Approximating KL divergence").
    """
    settings = settings or GrpoSettings()
    new, entropy = token_logprobs(model, micro, entropy=settings.entropy, chunk=chunk)
    behaviour = _behaviour_logprobs(micro, new, settings)
    advantages = micro.advantages[micro.loss_mask]
    if settings.old_logprobs == "behaviour":
        old, importance = behaviour, torch.ones_like(behaviour)
    else:
        old = new.detach() if old_logprobs is None else old_logprobs
        importance = (old - behaviour).exp().clamp(max=settings.importance_cap)
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    terms = -importance * torch.minimum(ratio * advantages, clipped * advantages)
    if settings.kl_coefficient > 0:
        terms = terms + settings.kl_coefficient * _kl_to_reference(new, reference_logprobs)
    # `new.sum() * 0` ties a micro-batch without loss tokens to the model, so that backward() works
    loss = (terms * _weights(micro, settings)).sum() * micro.loss_scale + new.sum() * 0
    if metrics is not None:
        metrics.add(
            loss=loss.detach() / micro.loss_scale,
            ratio=ratio.detach(),
            was_clipped=(clipped * advantages < ratio * advantages).detach(),
            mismatch=(new.detach() if old_logprobs is None else old_logprobs) - behaviour,
            staleness=micro.staleness[micro.loss_mask],
            entropy=entropy,
            sequences=micro.sequence_index[micro.loss_mask],
            versions=micro.versions[micro.loss_mask],
        )
    return loss


def check_logprobs(batch: Batch, settings: GrpoSettings) -> None:
    """Raise `InvalidGroup`, naming the task, when sequences of this rank's share lack logprobs that the loss needs."""
    if settings.absent_logprobs == "current":
        return
    for sequence in (batch.sequences[index] for index in batch.share):
        if np.isnan(sequence.logprobs).any():
            raise InvalidGroup(
                f"step {batch.step}: group {sequence.group_id} of task {sequence.task!r} was inserted {_REMEDY}"
            )


_REMEDY = (
    "without logprobs, and the loss compares with them: insert samples that have some, set absent_logprobs = "
    '"current" in [trainer.loss] for ratios of 1, or train with a custom loss'
)


def _behaviour_logprobs(micro: MicroBatch, new: torch.Tensor, settings: GrpoSettings) -> torch.Tensor:
    """The behaviour logprobs of the loss tokens, float32 [n]; where they are absent, the detached `new` ones."""
    behaviour = micro.behaviour_logprobs[micro.loss_mask]
    absent = behaviour.isnan()
    if settings.absent_logprobs == "refuse" and absent.any():
        raise InvalidGroup(f"the micro-batch has samples that were inserted {_REMEDY}")
    return torch.where(absent, new.detach(), behaviour)


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Add up the gradients of all ranks in place (all-reduce over the default process group), for reduction `sum`."""
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:  # every rank must take part
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


def _weights(micro: MicroBatch, settings: GrpoSettings) -> torch.Tensor:
    """The weight of each loss token in the batch's loss, float32 [n]."""
    counts = micro.counts
    tokens = micro.sample_loss_tokens[micro.loss_mask]
    match settings.aggregation:
        case "token":
            return torch.full_like(tokens, 1 / max(counts.loss_tokens, 1))
        case "sequence":
            return 1 / (tokens * counts.samples)
        case "constant":
            return torch.full_like(tokens, 1 / (settings.constant_tokens * max(counts.samples, 1)))


def _kl_to_reference(new: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
    if reference is None:
        raise ConfigError(
            "kl_coefficient > 0 needs reference_logprobs: token_logprobs(reference_model, micro).logprobs"
        )
    difference = reference - new
    return difference.exp() - difference - 1
