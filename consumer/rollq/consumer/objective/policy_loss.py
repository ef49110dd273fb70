"""The policy loss of a micro-batch. Needs torch.

Invariant: each token's weight depends on the counts of the whole batch, so the gradient does not depend on how the
batch was split into micro-batches and among ranks. `ConsumerSettings.reduction` sets how ranks combine gradients: by
sum (`sum_gradients`), or by average, as DDP and FSDP do.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rollq.buffer.errors import ConfigError, InvalidGroup
from rollq.buffer.rules.shards import task_of
from rollq.consumer.batches.batch import Batch
from rollq.consumer.batches.micro_batch import MicroBatch
from rollq.consumer.batches.sequences import BatchCounts, TokenSequence
from rollq.consumer.losses.aggregation import token_weights
from rollq.consumer.losses.components import distillation, distillation_top_k, imitation
from rollq.consumer.losses.compose import policy_terms
from rollq.consumer.losses.kl import k3
from rollq.consumer.losses.samples import sample_sums
from rollq.consumer.losses.settings import LossSettings
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.objective.teacher import ABSENT, TopLogprobs
from rollq.consumer.objective.token_logprobs import token_logprobs


@dataclass(frozen=True, slots=True)
class OtherLogprobs:
    """Logprobs, in nats, of a micro-batch's n loss tokens under weights other than the trained weights.

    `old` float32 [n]: with `old_logprobs = "recomputed"`, of the weights before the first update on the batch (default:
    the current weights, which is correct for one update per batch). `reference` float32 [n]: of the reference model,
    required with `kl_coefficient` > 0. `teacher` float32 [n]: from `rollq.consumer.teacher_logprobs`, for tokens of the
    tasks in `distillation`; with `distilled_tokens = "top_k"` they need `teacher_top` instead, from
    `rollq.consumer.teacher_top_logprobs`. All are ordered as in `token_logprobs`.
    """

    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    teacher: torch.Tensor | None = None
    teacher_top: TopLogprobs | None = None


def policy_loss(
    model: Any,
    micro: MicroBatch,
    settings: LossSettings | None = None,
    *,
    others: OtherLogprobs | None = None,
    keep: torch.Tensor | None = None,
    chunk: int = 0,
    metrics: LossMetrics | None = None,
) -> torch.Tensor:
    """Compute the micro-batch's part of the batch's loss, a scalar, times `micro.loss_scale`.

    Summing over a rank's micro-batches gives the rank's loss. Across ranks, sum or average, depending on the consumer's
    `reduction`. `rollq.consumer.losses.policy_terms` has the formula that `settings` compose; tokens of the tasks in
    `settings.sft` are imitated instead, and tokens of the tasks in `settings.distillation` follow a teacher. Each of
    these tasks has a separate denominator.

    `keep` bool [n] marks the tokens that the caller's mask keeps, such as a mask over the whole batch (default: all);
    the others stay in the denominators. `keep` is ordered as in `token_logprobs`, which explains `chunk`. `metrics` is
    updated, if given.

    Raises `ConfigError` if the reference's or the teacher's logprobs are missing, or if the loss needs whole samples
    and segments of a sample are in other micro-batches (`Batch.micro_batches(whole_samples=True)` keeps them together),
    and `InvalidGroup` if inserted samples have no logprobs and `settings.absent_logprobs` is `refuse`.
    """
    settings, others = settings or LossSettings(), others or OtherLogprobs()
    mask = micro.loss_mask
    top_ids = None if others.teacher_top is None else others.teacher_top.ids
    new, entropy, new_top = token_logprobs(model, micro, entropy=settings.entropy, others=top_ids, chunk=chunk)
    behaviour = _behaviour_logprobs(micro, new, settings)
    samples = micro.sample_index[mask]
    if settings.needs_whole_samples:
        _check_whole(micro, samples)
    policy = policy_terms(
        settings,
        new=new,
        behaviour=behaviour,
        advantages=micro.advantages[mask],
        samples=samples,
        old=others.old,
        reference=others.reference,
        keep=keep,
    )
    terms = _imitated_or_distilled(micro, settings, policy.terms, new, new_top, behaviour, others)
    # `new.sum() * 0` ties a micro-batch without loss tokens to the model, so that backward() works
    loss = (terms * _weights(micro, settings)).sum() * micro.loss_scale + new.sum() * 0
    if metrics is not None:
        is_other = _is_of(micro, settings.components)
        is_policy = torch.ones_like(policy.was_clipped) if is_other is None else ~is_other
        metrics.add(
            loss=loss.detach() / micro.loss_scale,
            ratio=policy.ratio,
            was_clipped=policy.was_clipped & is_policy,
            was_masked=policy.was_masked & is_policy,
            importance=policy.importance if settings.is_corrected else None,
            mismatch=(new.detach() if others.old is None else others.old) - behaviour,
            staleness=micro.staleness[mask],
            entropy=entropy,
            kl=None if others.reference is None else k3(new.detach(), others.reference),
            sequences=micro.sequence_index[mask],
            versions=micro.versions[mask],
        )
    return loss


def _imitated_or_distilled(
    micro: MicroBatch,
    settings: LossSettings,
    terms: torch.Tensor,
    new: torch.Tensor,
    new_top: torch.Tensor | None,
    behaviour: torch.Tensor,
    others: OtherLogprobs,
) -> torch.Tensor:
    """The terms, with another loss for the tasks in `settings.components`."""
    is_imitated, is_distilled = _is_of(micro, settings.sft), _is_of(micro, settings.distillation)
    if is_imitated is not None:
        terms = torch.where(is_imitated, imitation(new), terms)
    if is_distilled is None:
        return terms
    if settings.distilled_tokens == "sampled":
        teacher = _taught(others.teacher, is_distilled)
        return torch.where(is_distilled, distillation(new, behaviour, teacher), terms)
    return terms.masked_scatter(is_distilled, _distilled_top_k(new_top, others.teacher_top, is_distilled))


def leave_out_absent(
    batch: Batch, micro_batches: Sequence[MicroBatch], settings: LossSettings
) -> list[tuple[MicroBatch, Counter[str]]]:
    """Mask inserted samples without the logprobs that the loss needs. They stay in the denominators.

    `micro_batches` hold this rank's share of `batch`. A sample is left out as a whole, even if only one of its segments
    lacks logprobs. Returns each micro-batch without these samples, and the number of loss tokens it lost, by task.
    """
    share = [batch.sequences[index] for index in batch.share]
    absent = {sequence.sample for sequence in share if _lacks(sequence, settings)}
    return [_without(micro, absent) for micro in micro_batches]


def _lacks(sequence: TokenSequence, settings: LossSettings) -> bool:
    """Whether loss tokens of a sequence lack a logprob that the loss needs."""
    if settings.absent_logprobs == "current" or task_of(sequence.task) in settings.need_no_logprobs:
        return False
    return bool(np.isnan(sequence.logprobs[sequence.loss_mask]).any())


def _without(micro: MicroBatch, samples: Collection[int]) -> tuple[MicroBatch, Counter[str]]:
    """A micro-batch without these samples' loss tokens, and the number of removed tokens by task."""
    masked = micro.loss_mask & torch.isin(micro.sample_index, micro.sample_index.new_tensor(list(samples)))
    if not masked.any():
        return micro, Counter()
    tasks = list(micro.task_counts)
    left_out = Counter(tasks[index] for index in micro.task_index[masked].tolist())
    return replace(micro, loss_mask=micro.loss_mask & ~masked), left_out


ABSENT_REMEDY = (
    'set absent_logprobs = "current" in [trainer.loss] for ratios of 1, name the task in sft there to imitate it, or '
    "insert samples with logprobs"
)


def _behaviour_logprobs(micro: MicroBatch, new: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """The behaviour logprobs of the loss tokens, float32 [n]; where absent, the detached `new` logprobs."""
    behaviour = micro.behaviour_logprobs[micro.loss_mask]
    absent = behaviour.isnan()
    if settings.absent_logprobs == "refuse":
        spared = _is_of(micro, settings.need_no_logprobs)
        if (absent if spared is None else absent & ~spared).any():
            raise InvalidGroup(
                "the micro-batch has samples that were inserted without logprobs, and the loss compares with them: "
                f"{ABSENT_REMEDY}; rollq.consumer.leave_out_absent(batch, micro_batches, settings) leaves them out"
            )
    return torch.where(absent, new.detach(), behaviour)


def _check_whole(micro: MicroBatch, samples: torch.Tensor) -> None:
    """Raise `ConfigError` if the micro-batch lacks loss tokens of a sample; `samples` [n] gives each of its tokens'
    sample."""
    expected = micro.sample_loss_tokens[micro.loss_mask]
    if len(samples) and (sample_sums(torch.ones_like(expected), samples) != expected).any():
        raise ConfigError(
            "the loss compares whole samples, but some samples have segments in other micro-batches: use "
            "Batch.micro_batches(..., whole_samples=True)"
        )


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Add up the gradients of all ranks in place (all-reduce over the default process group), for reduction `sum`."""
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:  # every rank must take part
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


def _is_of(micro: MicroBatch, tasks: Collection[str]) -> torch.Tensor | None:
    """Whether the loss tokens belong to these `tasks`, bool [n]; None if there are no such tasks."""
    if not tasks:
        return None
    return _of_tasks(micro, [float(task in tasks) for task in micro.task_counts]) > 0


def _taught(teacher: torch.Tensor | None, is_distilled: torch.Tensor) -> torch.Tensor:
    if teacher is not None:
        return teacher
    if is_distilled.any():
        raise ConfigError(
            "distillation needs OtherLogprobs(teacher=rollq.consumer.teacher_logprobs(batch, micro, tasks))"
        )
    return torch.zeros_like(is_distilled, dtype=torch.float32)


def _distilled_top_k(new: torch.Tensor | None, teacher: TopLogprobs | None, is_distilled: torch.Tensor) -> torch.Tensor:
    """The terms of the distilled tokens, float32 [m]."""
    if new is None or teacher is None:
        raise ConfigError(
            'distilled_tokens = "top_k" needs '
            "OtherLogprobs(teacher_top=rollq.consumer.teacher_top_logprobs(batch, micro, tasks))"
        )
    taught = teacher.logprobs[is_distilled]
    return distillation_top_k(torch.where(taught > ABSENT, new[is_distilled], taught), taught)


def _weights(micro: MicroBatch, settings: LossSettings) -> torch.Tensor:
    """The weight of each loss token in the batch's loss, float32 [n]; a task with another loss has a separate mean."""
    components = settings.components
    counted = [counts for task, counts in micro.task_counts.items() if task not in components]
    counts = sum(counted, BatchCounts())
    weights = token_weights(
        micro.sample_loss_tokens[micro.loss_mask],
        settings.aggregation,
        tokens=counts.loss_tokens,
        samples=max(counts.samples, 1),
        constant=settings.constant_tokens,
    )
    is_other = _is_of(micro, components)
    return weights if is_other is None else torch.where(is_other, _component_weights(micro, components), weights)


def _component_weights(micro: MicroBatch, tasks: Mapping[str, float]) -> torch.Tensor:
    """Each loss token's weight within these `tasks`, float32 [n]: each task's weights form the mean over its tokens."""
    counts = micro.task_counts
    return _of_tasks(micro, [tasks.get(task, 0.0) / max(of_task.loss_tokens, 1) for task, of_task in counts.items()])


def _of_tasks(micro: MicroBatch, values: list[float]) -> torch.Tensor:
    """Each loss token's task value, float32 [n]; `values` follows the order of `task_counts`."""
    table = torch.tensor(values, dtype=torch.float32, device=micro.loss_mask.device)
    return table[micro.task_index[micro.loss_mask]]
