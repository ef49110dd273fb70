"""The response lengths of a batch, and how many responses were cut, for metrics and monitors."""

from collections.abc import Iterable, Sequence
from typing import Any

from rollq.buffer.values.rollouts import FinishReason
from rollq.consumer.batches.batch import Batch
from rollq.consumer.batches.worker_shares import trained_samples

Lengths = Sequence[tuple[int, bool]]
"""For each sample, its response tokens over all turns, and whether it was cut at the length limit."""


def response_lengths(batch: Batch) -> Lengths:
    """The lengths of the trained samples in this rank's share."""
    return [(sample.response_tokens, sample.finish_reason is FinishReason.LENGTH) for sample in trained_samples(batch)]


def described_lengths(of_ranks: Iterable[Lengths]) -> dict[str, Any]:
    """All ranks' lengths as facts about a step; empty without samples.

    `mean`, `p95` and `max` are in tokens; p95 is sorted[int(0.95 n)]. `clip_ratio` is the share of cut samples.
    """
    samples = [sample for of_rank in of_ranks for sample in of_rank]
    if not samples:
        return {}
    tokens = sorted(length for length, _ in samples)
    return {
        "response_length": {
            "mean": sum(tokens) / len(tokens),
            "p95": tokens[int(0.95 * len(tokens))],
            "max": tokens[-1],
            "clip_ratio": sum(was_cut for _, was_cut in samples) / len(samples),
        }
    }
