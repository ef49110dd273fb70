"""Plans of micro-batches hold every sequence once, within the limit, in the same number on each rank."""

import numpy as np
import pytest

from rollq.buffer.errors import ConfigError
from rollq.consumer.batches.packing import balance, groups_of_share, plan_micro_batches, share_out

LENGTHS = np.random.default_rng(3).integers(1, 200, 150).tolist()
SAMPLES = list(range(150))
PAIRS = [index // 2 for index in range(150)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("padded", [False, True])
def test_every_sequence_is_planned_once_within_the_limit_and_ranks_have_equally_many(ranks: int, padded: bool) -> None:
    planned = plan_micro_batches(LENGTHS, SAMPLES, balance(LENGTHS, ranks), 500, padded=padded)
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
    [bins] = plan_micro_batches(LENGTHS, SAMPLES, balance(LENGTHS, 1), 500)
    assert len(bins) <= 1.15 * sum(LENGTHS) / 500 + 1


def test_more_ranks_than_sequences_leaves_empty_micro_batches() -> None:
    assert plan_micro_batches([5, 3], [0, 1], balance([5, 3], 4), 10) == [[[0]], [[1]], [[]], [[]]]
    assert plan_micro_batches([], [], [[], []], 10) == [[[]], [[]]]


def test_a_sequence_longer_than_a_micro_batch_is_named() -> None:
    with pytest.raises(ConfigError, match=r"sequence 1 has 12 tokens.*max_tokens=10.*at least 12"):
        plan_micro_batches([3, 12], [0, 1], [[0, 1]], 10)


def random_groups(groups: int, samples: int, seed: int) -> tuple[list[int], list[int]]:
    """Lengths with a long tail, as those of reasoning models, and the group of each."""
    random = np.random.default_rng(seed)
    lengths = np.minimum(random.lognormal(8.5, 1, groups * samples), 32_768).astype(int) + 100
    return lengths.tolist(), np.repeat(np.arange(groups), samples).tolist()


@pytest.mark.parametrize(("groups", "samples", "ranks"), [(64, 16, 8), (16, 8, 8), (5, 16, 8), (512, 8, 64), (7, 3, 1)])
def test_shares_hold_every_sequence_once_and_are_balanced(groups: int, samples: int, ranks: int) -> None:
    for seed in range(20):
        lengths, owners = random_groups(groups, samples, seed)
        shares = share_out(lengths, range(len(lengths)), owners, ranks)
        assert sorted(sequence for share in shares for sequence in share) == list(range(len(lengths)))
        loads = [sum(lengths[sequence] for sequence in share) for share in shares]
        divided = [sum(lengths[sequence] for sequence in share) for share in balance(lengths, ranks)]
        assert max(loads) <= 1.03 * max(max(divided), sum(lengths) / ranks)


def test_shares_of_many_groups_divide_none_of_them() -> None:
    for seed in range(20):
        lengths, owners = random_groups(64, 16, seed)
        read = [
            {owners[sequence] for sequence in share} for share in share_out(lengths, range(len(lengths)), owners, 8)
        ]
        assert sum(map(len, read)) == 64
        by_group = [[[length] for length in lengths[first : first + 16]] for first in range(0, len(lengths), 16)]
        assert read == [set(groups_of_share(by_group, rank, 8)) for rank in range(8)]


def test_few_groups_are_divided_among_the_ranks() -> None:
    assert [len(share) for share in share_out([10] * 16, range(16), [0] * 16, 8)] == [2] * 8
    assert sorted(map(len, share_out([10, 10], [0, 1], [0, 1], 4))) == [0, 0, 1, 1]
    assert share_out([], [], [], 2) == [[], []]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("padded", [False, True])
def test_the_segments_of_a_sample_stay_together(ranks: int, padded: bool) -> None:
    shares = share_out(LENGTHS, PAIRS, [0] * 150, ranks)
    planned = plan_micro_batches(LENGTHS, PAIRS, shares, 500, padded=padded, whole_samples=True)
    micro_batches = [chosen for bins in planned for chosen in bins]
    assert sorted(index for chosen in micro_batches for index in chosen) == list(range(150))
    for chosen in micro_batches:
        lengths = [LENGTHS[index] for index in chosen]
        assert (len(lengths) * max(lengths, default=0) if padded else sum(lengths)) <= 500
        assert {index ^ 1 for index in chosen} == set(chosen)


def test_a_sample_that_does_not_fit_is_divided_or_refused() -> None:
    assert plan_micro_batches([6, 6, 2], [0, 0, 1], [[0, 1, 2]], 8) == [[[0, 2], [1]]]
    with pytest.raises(ConfigError, match=r"^sample 0 has 2 segments of 12 tokens together.* to at least 12"):
        plan_micro_batches([6, 6, 2], [0, 0, 1], [[0, 1, 2]], 8, whole_samples=True)


@pytest.mark.parametrize("padded", [False, True])
def test_there_are_exactly_as_many_micro_batches_as_asked_for(padded: bool) -> None:
    for count in (60, 75, 200):
        shares = balance(LENGTHS, 2)
        planned = plan_micro_batches(LENGTHS, SAMPLES, shares, 500, padded=padded, count=count)
        assert [len(bins) for bins in planned] == [count, count]
        for bins, share in zip(planned, shares, strict=True):
            assert sorted(index for chosen in bins for index in chosen) == sorted(share)
    with pytest.raises(ConfigError, match=r"needs \d+ micro-batches of at most max_tokens=500.* count=3: raise"):
        plan_micro_batches(LENGTHS, SAMPLES, shares, 500, padded=padded, count=3)
