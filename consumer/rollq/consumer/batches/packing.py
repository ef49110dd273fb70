"""Assigns sequences to ranks and micro-batches: pure decisions based on sequence lengths.

Invariants: every rank computes the same plan from the same lengths. Each sequence is in exactly one micro-batch, with
the other sequences of its sample if they fit. Every rank has the same number of micro-batches (some may be empty), so
collective operations match.
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import chain

from rollq.buffer.errors import ConfigError

MOST_IMBALANCE = 1.03
"""The heaviest share of whole groups may be this many times as heavy as the heaviest share of whole samples."""


def balance(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Split sequences over `bins` with similar token counts: longest first, each to the lightest bin.

    This is greedy longest-processing-time scheduling: the heaviest bin is at most 4/3 of the optimum (Graham 1969).
    """
    shares: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, index) for index in range(bins)]
    for sequence in _longest_first(range(len(lengths)), lengths):
        load, index = heapq.heappop(heap)
        shares[index].append(sequence)
        heapq.heappush(heap, (load + lengths[sequence], index))
    return shares


def share_out(lengths: Sequence[int], samples: Sequence[int], groups: Sequence[int], ranks: int) -> list[list[int]]:
    """Each rank's sequences. Sequence i has `lengths[i]` tokens, and belongs to sample `samples[i]`, numbered within
    the batch, of group `groups[i]`.

    A rank gets whole groups, and reads only these. If that makes the heaviest share too heavy (see `MOST_IMBALANCE`),
    as with fewer groups than ranks, each rank gets whole samples.
    """
    shares = _share_units(lengths, groups, ranks)
    heaviest = _heaviest(shares, lengths)
    if heaviest * ranks > MOST_IMBALANCE * sum(lengths):
        divided = _share_units(lengths, samples, ranks)
        if heaviest > MOST_IMBALANCE * _heaviest(divided, lengths):
            shares = divided
    return [sorted(share) for share in shares]


def share_out_parts(
    lengths: Sequence[int], samples: Sequence[int], groups: Sequence[int], ends: Sequence[int], ranks: int
) -> list[list[int]]:
    """Like `share_out`, part by part. Each part ends before its group number in `ends`."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    first = 0
    for end in ends:
        last = bisect_left(groups, end, first)
        if last > first:
            added = share_out(lengths[first:last], samples[first:last], groups[first:last], ranks)
            shares = [share + [first + offset for offset in new] for share, new in zip(shares, added, strict=True)]
        first = last
    return shares


def _share_units(lengths: Sequence[int], owners: Sequence[int], ranks: int) -> list[list[int]]:
    """Each rank's sequences. A rank gets all sequences of an owner or none."""
    units = _units(range(len(lengths)), owners)
    shares = balance([sum(lengths[sequence] for sequence in unit) for unit in units], ranks)
    return [[sequence for index in share for sequence in units[index]] for share in shares]


def _units(sequences: Iterable[int], owners: Sequence[int]) -> list[list[int]]:
    """Each owner's sequences, in order of the owners' first appearance."""
    members: dict[int, list[int]] = {}
    for sequence in sequences:
        members.setdefault(owners[sequence], []).append(sequence)
    return list(members.values())


def _heaviest(shares: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    return max(sum(lengths[sequence] for sequence in share) for share in shares)


def groups_of_share(lengths: Sequence[Sequence[Sequence[int]]], rank: int, ranks: int) -> list[int]:
    """The groups that have sequences on a rank. `lengths[g][s]` holds the sequence lengths of sample s of group g."""
    flat = [
        (length, sample, group)
        for group, of_group in enumerate(lengths)
        for sample, of_sample in enumerate(of_group, start=sum(map(len, lengths[:group])))
        for length in of_sample
    ]
    sizes, samples, groups = ([sequence[at] for sequence in flat] for at in range(3))
    return sorted({groups[sequence] for sequence in share_out(sizes, samples, groups, ranks)[rank]})


def plan_micro_batches(
    lengths: Sequence[int],
    samples: Sequence[int],
    shares: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    padded: bool = False,
    count: int | None = None,
    whole_samples: bool = False,
) -> list[list[list[int]]]:
    """Micro-batches as sequence indices, `[rank][micro_batch][...]`, each of at most `max_tokens` tokens.

    `shares` holds each rank's sequences. With `count`, each rank has exactly `count` micro-batches.

    A packed micro-batch takes the sum of its lengths; a padded one takes its number of rows times its longest sequence.
    The sequences of a sample, `samples[i]` for sequence i, share one micro-batch. A sample that does not fit is
    divided, unless `whole_samples` is set.

    Raises `ConfigError` for a sequence longer than `max_tokens`, for such a sample with `whole_samples`, and if more
    than `count` micro-batches are needed.
    """
    _check_lengths(lengths, max_tokens)

    def fitting(unit: list[int]) -> list[list[int]]:
        tokens = _tokens(unit, lengths, padded)
        if tokens <= max_tokens:
            return [unit]
        if whole_samples:
            raise ConfigError(
                f"sample {samples[unit[0]]} has {len(unit)} segments of {tokens} tokens together, more than "
                f"max_tokens={max_tokens!r} of a micro-batch: raise max_tokens to at least {tokens}"
            )
        return [[sequence] for sequence in unit]

    units = [list(chain.from_iterable(map(fitting, _units(share, samples)))) for share in shares]
    ranked = [_fill(of_rank, lengths, max_tokens, padded) for of_rank in units]
    needed = max(1, *map(len, ranked))
    if count is not None and needed > count:
        raise ConfigError(
            f"the batch needs {needed} micro-batches of at most max_tokens={max_tokens!r} tokens, more than "
            f"count={count!r}: raise max_tokens or count"
        )
    divided = (_split_to(bins, count or needed) for bins in ranked)
    return [[list(chain.from_iterable(units)) for units in of_rank] for of_rank in divided]


def _check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    """Raise `ConfigError` for a sequence that is longer than `max_tokens`."""
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    if longest is not None and lengths[longest] > max_tokens:
        raise ConfigError(
            f"sequence {longest} has {lengths[longest]} tokens, more than max_tokens={max_tokens!r} of a micro-batch: "
            f"raise max_tokens to at least {lengths[longest]}, or generate shorter samples"
        )


def _longest_first(sequences: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(sequences, key=lambda index: (-lengths[index], index))


def _tokens(sequences: Sequence[int], lengths: Sequence[int], padded: bool) -> int:
    """The number of a micro-batch's tokens that the sequences take."""
    taken = [lengths[sequence] for sequence in sequences]
    return len(taken) * max(taken) if padded else sum(taken)


def _fill(units: list[list[int]], lengths: Sequence[int], max_tokens: int, padded: bool) -> list[list[list[int]]]:
    """Put units of sequences into bins of at most `max_tokens`. Each unit fits a bin."""
    sizes = [max(lengths[sequence] for sequence in unit) if padded else _tokens(unit, lengths, False) for unit in units]
    order = _longest_first(range(len(units)), sizes)
    if padded:
        bins = _fill_padded(order, sizes, list(map(len, units)), max_tokens)
    else:
        bins = _fill_packed(order, sizes, max_tokens)
    return [[units[index] for index in filled] for filled in bins]


def _fill_packed(order: Sequence[int], sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill bins greedily, largest first; the lightest bin takes the next unit, which keeps bins even."""
    bins: list[list[int]] = []
    heap: list[tuple[int, int]] = []
    for unit in order:
        if heap and heap[0][0] + sizes[unit] <= max_tokens:
            load, index = heapq.heappop(heap)
        else:
            load, index = 0, len(bins)
            bins.append([])
        bins[index].append(unit)
        heapq.heappush(heap, (load + sizes[unit], index))
    return bins


def _fill_padded(order: Sequence[int], widths: Sequence[int], rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put units of similar width together, widest first: a bin is as wide as its first unit."""
    bins: list[list[int]] = []
    filled = 0
    for unit in order:
        if not bins or (filled + rows[unit]) * widths[bins[-1][0]] > max_tokens:
            bins.append([])
            filled = 0
        bins[-1].append(unit)
        filled += rows[unit]
    return bins


def _split_to(bins: list[list[list[int]]], count: int) -> list[list[list[int]]]:
    """Spread the bins over exactly `count`: the bins with the most units are halved, then empty bins are added."""
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
