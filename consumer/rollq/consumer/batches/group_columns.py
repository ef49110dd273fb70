"""Columns of a batch from the rows of its groups, without samples: rewards, lengths, counts. Pure."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollq.buffer.calls.replies.claims import ClaimedGroup
from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.rollouts import BoolArray, Float32Array, Group, VersionSpan
from rollq.buffer.wire.sample_rows import SampleRows
from rollq.consumer.batches.sequences import BatchCounts, TokenStaleness


def task_numbers(group_ids: Sequence[tuple[str, int]]) -> npt.NDArray[np.int64]:
    """A number for each group's task. All shards of a task share one number."""
    return np.unique([task_of(name) for name, _ in group_ids], return_inverse=True)[1].astype(np.int64)


def trained_rewards(groups: Sequence[Group | ClaimedGroup], rows: Sequence[SampleRows]) -> Float32Array:
    """The rewards of all samples, float32 [n], 0 for a sample without a reward."""
    pairs = zip(groups, rows, strict=True)
    return np.array([reward or 0.0 for group, row in pairs for reward in _rewards(group, row)], dtype=np.float32)


def probability_of(group: Group | ClaimedGroup) -> float:
    """The probability of a group's draw; NaN in an order without draws."""
    drawn = group.probability if isinstance(group, ClaimedGroup) else None
    return np.nan if drawn is None else drawn


def segment_lengths(rows: Sequence[SampleRows]) -> npt.NDArray[np.int64]:
    """Every segment's number of tokens, over all samples, int64 [segments]."""
    return np.array([length for row in rows for segments in row.lengths for length in segments], dtype=np.int64)


def _rewards(group: Group | ClaimedGroup, rows: SampleRows) -> Sequence[float | None]:
    """The rewards of a group's samples: the pipeline's if it set any, otherwise the judge's."""
    return group.shaped.rewards if group.shaped else rows.rewards


def counts_of(rows: SampleRows, staleness: TokenStaleness) -> BatchCounts:
    """A group's contribution to a loss's denominators."""
    samples = sum(reward is not None for reward in rows.rewards)
    return BatchCounts(_loss_tokens(rows, staleness), samples, int(samples > 0))


def _loss_tokens(rows: SampleRows, staleness: TokenStaleness) -> int:
    """How many of a group's tokens are in the loss: those young enough, or in a sample with labels."""
    young = staleness.mask([VersionSpan(*weights, 1) for weights in rows.loss_tokens])
    return sum(
        n
        for is_young, tokens in zip(young, rows.loss_tokens.values(), strict=True)
        for n, is_labelled in zip(tokens, rows.labelled, strict=True)
        if is_young or is_labelled
    )


def pipeline_advantages(
    computed: Float32Array, groups: Sequence[Group | ClaimedGroup], owners: npt.NDArray[np.int64], valid: BoolArray
) -> Float32Array:
    """The `computed` advantages [S], replaced by a pipeline's where set. `owners` [S] maps samples to `groups`."""
    chosen = computed.copy()
    for index, group in enumerate(groups):
        if group.shaped and group.shaped.advantages is not None:
            in_group = owners == index
            chosen[in_group] = np.where(valid[in_group], group.shaped.advantages, 0.0)
    return chosen
