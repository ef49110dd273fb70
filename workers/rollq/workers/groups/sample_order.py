"""Decides which waiting sample of a worker is generated next. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from rollq.buffer.values.rollouts import Lease, Sample, SampleStatus


class Turn(NamedTuple):
    """The place of a sample in the order; the smallest is next.

    Siblings of a started sample come first: their group ends sooner, and they share the engine's cache of the prompt.
    Then the earliest step comes, training before evaluation. Then the longest answer comes, which would otherwise run
    last and alone.
    """

    waits: bool
    step: int
    evaluation: bool
    shorter: float
    group_id: int


def turn_of(lease: Lease, *, placed: bool, expected_tokens: float) -> Turn:
    """The turn of the samples of a lease. `placed`: a sample has had a place."""
    return Turn(not placed, lease.step, lease.evaluation, -expected_tokens, lease.group_id)


def expected_tokens(lease: Lease, finished: Sequence[Sample]) -> float:
    """The expected length of an answer to a lease's prompt: the mean of its `finished` samples, otherwise an estimate
    from earlier groups of the prompt; 0 if unknown."""
    lengths = [sample.response_tokens for sample in finished if sample.status is SampleStatus.COMPLETED]
    return sum(lengths) / len(lengths) if lengths else lease.expected_tokens
