"""Decides which waiting sample of a worker is generated next. Pure."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from rollq.buffer.values.rollouts import Lease, Sample
from rollq.workers.groups.filters import completed


class Turn(NamedTuple):
    """A sample's position in the order; the sample with the smallest position is next.

    Siblings of a started sample come first: their group ends sooner, and they share the engine's cache of the prompt.
    Then the earliest step comes first, training before evaluation. Then the longest answer comes first, which would
    otherwise run last and alone; an unknown length may be the longest.
    """

    waits: bool
    step: int
    evaluation: bool
    shorter: float
    group_id: int


def turn_of(lease: Lease, *, placed: bool, expected_tokens: float) -> Turn:
    """The turn of a lease's samples. `placed` is true if a sample has had a place."""
    return Turn(not placed, lease.step, lease.evaluation, -(expected_tokens or inf), lease.group_id)


def expected_tokens(lease: Lease, finished: Sequence[Sample]) -> float:
    """The expected length of an answer to a lease's prompt; 0 if unknown. The mean of the `finished` samples' lengths,
    or an estimate from the prompt's earlier groups.
    """
    lengths = [sample.response_tokens for sample in completed(finished)]
    return sum(lengths) / len(lengths) if lengths else lease.expected_tokens
