"""Assigns sequences to ranks and micro-batches: pure decisions over their lengths.

Invariant: every rank computes the same plan from the same lengths, each sequence is in exactly one micro-batch, and
every rank has the same number of micro-batches (some may be empty), so that collective operations line up.
"""

import heapq
from collections.abc import Sequence

from rollq.buffer.errors import ConfigError

MOST_IMBALANCE = 1.03
"""Shares of whole groups may be this many times as heavy as shares of single sequences."""


def balance(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Split sequences over `bins` so that their token counts are close: longest first, each to the lightest bin.

    This is greedy longest-processing-time scheduling: the heaviest bin is at most 4/3 of the optimum (Graham 1969).
    """
    shares: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, index) for index in range(bins)]
    for sequence in _longest_first(range(len(lengths)), lengths):
        load, index = heapq.heappop(heap)
        shares[index].append(sequence)
        heapq.heappush(heap, (load + lengths[sequence], index))
    return shares


def share_out(lengths: Sequence[int], groups: Sequence[int], ranks: int) -> list[list[int]]:
    """The sequences of each rank, where sequence i has `lengths[i]` tokens and belongs to group `groups[i]`.

    A rank gets whole groups, so that it reads no others, unless that makes the heaviest share too heavy (see
    `MOST_IMBALANCE`), as with fewer groups than ranks.
    """
    members: dict[int, list[int]] = {}
    for sequence, group in enumerate(groups):
        members.setdefault(group, []).append(sequence)
    found = list(members.values())
    by_group = balance([sum(lengths[sequence] for sequence in mine) for mine in found], ranks)
    whole = [[sequence for index in share for sequence in found[index]] for share in by_group]
    heaviest = _heaviest(whole, lengths)
    if heaviest * ranks > MOST_IMBALANCE * sum(lengths):
        divided = balance(lengths, ranks)
        if heaviest > MOST_IMBALANCE * _heaviest(divided, lengths):
            whole = divided
    return [sorted(share) for share in whole]


def _heaviest(shares: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    return max(sum(lengths[sequence] for sequence in share) for share in shares)


def groups_of_share(lengths: Sequence[Sequence[int]], rank: int, ranks: int) -> list[int]:
    """The groups of which a rank has sequences, where `lengths[g]` are those of the sequences of group g."""
    groups = [group for group, mine in enumerate(lengths) for _ in mine]
    share = share_out([length for mine in lengths for length in mine], groups, ranks)[rank]
    return sorted({groups[sequence] for sequence in share})


def plan_micro_batches(
    lengths: Sequence[int], shares: Sequence[Sequence[int]], max_tokens: int, *, padded: bool = False
) -> list[list[list[int]]]:
    """Micro-batches as sequence indices, `[rank][micro_batch][...]`, each of at most `max_tokens` tokens.

    `shares` are the sequences of each rank.

    Packed, a micro-batch takes the sum of its lengths; padded, its number of rows times its longest sequence.
    Raises `ConfigError` if a single sequence is longer than `max_tokens`.
    """
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    if longest is not None and lengths[longest] > max_tokens:
        raise ConfigError(
            f"sequence {longest} has {lengths[longest]} tokens, more than max_tokens={max_tokens!r} of a micro-batch: "
            f"raise max_tokens to at least {lengths[longest]}, or generate shorter samples"
        )
    fill = _fill_padded if padded else _fill_packed
    ranked = [fill(share, lengths, max_tokens) for share in shares]
    count = max(1, *(len(bins) for bins in ranked))
    return [_split_to(bins, count) for bins in ranked]


def _longest_first(sequences: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(sequences, key=lambda index: (-lengths[index], index))


def _fill_packed(share: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill bins greedily, longest sequence first; the lightest bin takes the next one, which keeps bins even."""
    bins: list[list[int]] = []
    heap: list[tuple[int, int]] = []
    for sequence in _longest_first(share, lengths):
        if heap and heap[0][0] + lengths[sequence] <= max_tokens:
            load, index = heapq.heappop(heap)
        else:
            load, index = 0, len(bins)
            bins.append([])
        bins[index].append(sequence)
        heapq.heappush(heap, (load + lengths[sequence], index))
    return bins


def _fill_padded(share: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put runs of similar lengths together: a bin is as wide as its first sequence."""
    bins: list[list[int]] = []
    for sequence in _longest_first(share, lengths):
        if not bins or (len(bins[-1]) + 1) * lengths[bins[-1][0]] > max_tokens:
            bins.append([])
        bins[-1].append(sequence)
    return bins


def _split_to(bins: list[list[int]], count: int) -> list[list[int]]:
    """Spread the bins over exactly `count`: the fullest are halved, then empty ones are added."""
    bins = list(bins)
    while len(bins) < count:
        fullest = max(range(len(bins)), key=lambda index: len(bins[index]), default=None)
        if fullest is None or len(bins[fullest]) < 2:
            bins.append([])
            continue
        half = len(bins[fullest]) // 2
        bins.append(bins[fullest][half:])
        bins[fullest] = bins[fullest][:half]
    return bins
