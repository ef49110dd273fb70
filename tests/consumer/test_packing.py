"""Plans of micro-batches hold every sequence once, within the limit, in the same number on each rank."""

import numpy as np
import pytest

from rollq.buffer.errors import ConfigError
from rollq.consumer.packing import balance, plan_micro_batches

LENGTHS = np.random.default_rng(3).integers(1, 200, 150).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("padded", [False, True])
def test_every_sequence_is_planned_once_within_the_limit_and_ranks_have_equally_many(ranks: int, padded: bool) -> None:
    planned = plan_micro_batches(LENGTHS, ranks, 500, padded=padded)
    assert len({len(bins) for bins in planned}) == 1
    micro_batches = [chosen for bins in planned for chosen in bins]
    assert sorted(index for chosen in micro_batches for index in chosen) == list(range(len(LENGTHS)))
    for chosen in micro_batches:
        lengths = [LENGTHS[index] for index in chosen]
        assert (len(lengths) * max(lengths, default=0) if padded else sum(lengths)) <= 500


def test_shares_are_balanced_by_tokens() -> None:
    loads = [sum(LENGTHS[index] for index in share) for share in balance(LENGTHS, 8)]
    assert max(loads) - min(loads) <= 10


def test_packing_wastes_little() -> None:
    [bins] = plan_micro_batches(LENGTHS, 1, 500)
    assert len(bins) <= 1.15 * sum(LENGTHS) / 500 + 1


def test_more_ranks_than_sequences_leaves_empty_micro_batches() -> None:
    assert plan_micro_batches([5, 3], 4, 10) == [[[0]], [[1]], [[]], [[]]]
    assert plan_micro_batches([], 2, 10) == [[[]], [[]]]


def test_a_sequence_longer_than_a_micro_batch_is_named() -> None:
    with pytest.raises(ConfigError, match=r"sequence 1 has 12 tokens.*max_tokens=10.*at least 12"):
        plan_micro_batches([3, 12], 1, 10)
