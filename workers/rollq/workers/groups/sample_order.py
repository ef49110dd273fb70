"""Which waiting sample of a worker is generated next. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from rollq.buffer.values.rollouts import Lease, Sample, SampleStatus


class Turn(NamedTuple):
    """The place of a sample in the order; the smallest is next.

    Siblings of a sample that has started come first: their group ends sooner, and they share the engine's cache of its
    prompt. Then the earliest step, in which training comes before evaluation; then the longest answer, which would
    otherwise end last, alone.
    """

    waits: bool
    step: int
    evaluation: bool
    shorter: float
    group_id: int


def turn_of(lease: Lease, *, placed: bool, expected_tokens: float) -> Turn:
    """The turn of the samples of a lease. `placed`: one of them has had a place."""
    return Turn(not placed, lease.step, lease.evaluation, -expected_tokens, lease.group_id)


def expected_tokens(lease: Lease, finished: Sequence[Sample]) -> float:
    """How long an answer to the prompt of a lease may become: the mean of its `finished` samples, or what is known of
    earlier groups of the prompt; 0 when nothing is known."""
    lengths = [sample.response_tokens for sample in finished if sample.status is SampleStatus.COMPLETED]
    return sum(lengths) / len(lengths) if lengths else lease.expected_tokens
