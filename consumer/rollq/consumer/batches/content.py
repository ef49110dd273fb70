"""The groups of a batch and their sequences, read from the store on first access.

Each rank has its share's groups from the start. Other data, such as other ranks' sequences, is read on access.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

from rollq.buffer.values.rollouts import BoolArray, Group, Sample
from rollq.buffer.values.sample_columns import Samples
from rollq.buffer.wire.sample_rows import SampleRows
from rollq.consumer.batches.sequences import TokenSequence, TokenStaleness, token_sequences

T = TypeVar("T")


class Reader(Protocol):
    """Reads the groups of a batch."""

    def rows(self) -> Sequence[SampleRows]:
        """The rows of every group."""

    def read(self, indices: Sequence[int]) -> Sequence[Group]:
        """The groups at these indices."""


class HeldGroups:
    """A `Reader` of groups in memory."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups

    def rows(self) -> Sequence[SampleRows]:
        """The rows of every group."""
        return [SampleRows.of(Samples.of(group.samples)) for group in self._groups]

    def read(self, indices: Sequence[int]) -> Sequence[Group]:
        """The groups at these indices."""
        return [self._groups[index] for index in indices]


class OnDemand(Sequence[T]):
    """A sequence of `count` items. On access, `get` makes the items at the requested indices."""

    def __init__(self, count: int, get: Callable[[Sequence[int]], list[T]]) -> None:
        self._count = count
        self._get = get

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        chosen = range(self._count)[index]
        return tuple(self._get(chosen)) if isinstance(chosen, range) else self._get([chosen])[0]

    def __iter__(self) -> Iterator[T]:
        return iter(self._get(range(self._count)))

    def __len__(self) -> int:
        return self._count


class BatchContent:
    """The groups of a batch, their flat samples and their sequences.

    `sample_groups` int64 [S] and `sequence_groups` int64 [n] map flat samples and sequences to their groups;
    `sequence_samples` int64 [n] maps sequences to flat samples. `sample_tokens` int64 [S] counts each flat sample's
    loss tokens, of any age.
    """

    def __init__(
        self,
        rows: Sequence[SampleRows],
        valid: BoolArray,
        staleness: Sequence[TokenStaleness],
        read: Callable[[Sequence[int]], Sequence[Group]],
        before: "BatchContent | None" = None,
    ) -> None:
        """`rows` and `staleness` have an item for each group; `valid` bool [S] marks the flat samples to train; `read`
        reads groups by index. `before` holds the content of the leading groups, which is reused."""
        self._read = read
        self._valid = valid
        self._staleness = staleness
        self._groups: dict[int, Group] = dict(before._groups) if before else {}
        self._sequences: dict[int, tuple[TokenSequence, ...]] = dict(before._sequences) if before else {}
        samples = [len(of_group.rewards) for of_group in rows]
        sequences = [sum(map(len, of_group.lengths)) for of_group in rows]
        self._first_sample, self._first_sequence = _starts(samples), _starts(sequences)
        self.sample_groups: npt.NDArray[np.int64] = np.repeat(np.arange(len(rows)), samples)
        self.sequence_groups: npt.NDArray[np.int64] = np.repeat(np.arange(len(rows)), sequences)
        segments = [len(lengths) for of_group in rows for lengths in of_group.lengths]
        self.sequence_samples: npt.NDArray[np.int64] = np.repeat(np.arange(len(segments)), segments)
        tokens = map(_loss_tokens, rows)
        self.sample_tokens: npt.NDArray[np.int64] = np.concatenate([np.zeros(0, np.int64), *tokens])
        self.groups = OnDemand(len(rows), self._groups_at)
        self.samples = OnDemand(sum(samples), self._samples_at)
        self.sequences = OnDemand(sum(sequences), self._sequences_at)

    def keep(self, indices: Iterable[int], groups: Iterable[Group]) -> None:
        """Keep groups already read, by index."""
        self._groups.update(zip(indices, groups, strict=True))

    def make_sequences(self, indices: Sequence[int]) -> None:
        """Read the groups at these indices, and make the sequences of all groups held, in one go."""
        self._groups_at(indices)
        new = sorted(self._groups.keys() - self._sequences.keys())
        if not new:
            return
        made = iter(self._made(new))
        for index in new:
            count = self._first_sequence[index + 1] - self._first_sequence[index]
            self._sequences[index] = tuple(islice(made, int(count)))

    def _made(self, indices: Sequence[int]) -> Sequence[TokenSequence]:
        """The sequences of these groups, one group after another."""
        samples = [slice(self._first_sample[index], self._first_sample[index + 1]) for index in indices]
        valid = np.concatenate([self._valid[span] for span in samples])
        groups, starts = [self._groups[index] for index in indices], [span.start for span in samples]
        return token_sequences(groups, valid, [self._staleness[index] for index in indices], starts)

    def _groups_at(self, indices: Sequence[int]) -> list[Group]:
        if missing := sorted(set(indices) - self._groups.keys()):
            self.keep(missing, self._read(missing))
        return [self._groups[index] for index in indices]

    def _samples_at(self, indices: Sequence[int]) -> list[Sample]:
        owners = self.sample_groups[list(indices)].tolist()
        groups = self._groups_at(owners)
        firsts = [self._first_sample[owner] for owner in owners]
        return [group.samples[index - first] for group, index, first in zip(groups, indices, firsts, strict=True)]

    def _sequences_at(self, indices: Sequence[int]) -> list[TokenSequence]:
        owners = self.sequence_groups[list(indices)].tolist()
        if set(owners) - self._sequences.keys():
            self.make_sequences(owners)
        return [
            self._sequences[owner][index - self._first_sequence[owner]]
            for index, owner in zip(indices, owners, strict=True)
        ]


def _starts(counts: Sequence[int]) -> list[int]:
    """The start of each run of items, then the end of the last run."""
    return [0, *np.cumsum(counts, dtype=np.int64).tolist()]


def _loss_tokens(rows: SampleRows) -> npt.NDArray[np.int64]:
    """Each sample's number of loss tokens."""
    tokens: npt.NDArray[np.int64] = np.sum(
        [*rows.loss_tokens.values(), [0] * len(rows.rewards)], axis=0, dtype=np.int64
    )
    return tokens
