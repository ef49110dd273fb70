"""The groups of a batch and their sequences, read from the store when they are first asked for.

A rank has those of its share at once. What it asks for besides, such as a sequence of another rank, is read then.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, overload

import numpy as np
import numpy.typing as npt

from rollq.buffer.rollouts import BoolArray, Group, Sample
from rollq.buffer.wire.rows import SampleRows
from rollq.consumer.sequences import TokenSequence, TokenStaleness, token_sequences

T = TypeVar("T")

Read = Callable[[Sequence[int]], Sequence[Group]]
"""Reads groups of the batch, by index."""


class OnDemand(Sequence[T]):
    """A sequence of `count` items, each made by `get` when it is asked for, or all of them after one `get_all`."""

    def __init__(self, count: int, get: Callable[[int], T], get_all: Callable[[], None]) -> None:
        self._count = count
        self._get = get
        self._get_all = get_all

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple([self._get(one) for one in range(self._count)[index]])
        return self._get(range(self._count)[index])

    def __iter__(self) -> Iterator[T]:
        self._get_all()
        return map(self._get, range(self._count))

    def __len__(self) -> int:
        return self._count


class BatchContent:
    """Everything in a batch but its rows.

    `sample_groups` int64 [S] and `sequence_groups` int64 [n] are the group of each flat sample and of each sequence.
    """

    def __init__(
        self,
        rows: Sequence[SampleRows],
        valid: BoolArray,
        staleness: Mapping[str, TokenStaleness],
        read: Read,
    ) -> None:
        """`rows`: those of each group; `valid` bool [S]: flat samples that are trained; `staleness`: of each task."""
        self._read = read
        self._valid = valid
        self._staleness = staleness
        self._groups: dict[int, Group] = {}
        self._sequences: dict[int, tuple[TokenSequence, ...]] = {}
        samples = [len(mine.rewards) for mine in rows]
        sequences = [sum(map(len, mine.lengths)) for mine in rows]
        self._first_sample, self._first_sequence = _starts(samples), _starts(sequences)
        self.sample_groups: npt.NDArray[np.int64] = np.repeat(np.arange(len(rows)), samples)
        self.sequence_groups: npt.NDArray[np.int64] = np.repeat(np.arange(len(rows)), sequences)
        self.groups = OnDemand(len(rows), self._group, self._load_all)
        self.sequences = OnDemand(sum(sequences), self._sequence, self._load_all)
        self.samples = OnDemand(sum(samples), self._sample, self._load_all)

    def load(self, groups: Iterable[int]) -> None:
        """Read these groups, by index, in one go, unless they are here already. Raises as `Read` does."""
        if missing := sorted(set(groups) - self._groups.keys()):
            self._groups.update(zip(missing, self._read(missing), strict=True))

    def make_sequences(self) -> None:
        """Make the sequences of all groups that are here, in one go."""
        new = sorted(self._groups.keys() - self._sequences.keys())
        if not new:
            return
        samples = [slice(self._first_sample[index], self._first_sample[index + 1]) for index in new]
        valid = np.concatenate([self._valid[one] for one in samples])
        groups, starts = [self._groups[index] for index in new], [one.start for one in samples]
        made = iter(token_sequences(groups, valid, self._staleness, starts))
        for index in new:
            count = self._first_sequence[index + 1] - self._first_sequence[index]
            self._sequences[index] = tuple([next(made) for _ in range(count)])

    def _load_all(self) -> None:
        self.load(range(len(self.groups)))

    def _group(self, index: int) -> Group:
        self.load([index])
        return self._groups[index]

    def _sequence(self, index: int) -> TokenSequence:
        group = int(self.sequence_groups[index])
        if group not in self._sequences:
            self.load([group])
            self.make_sequences()
        return self._sequences[group][index - self._first_sequence[group]]

    def _sample(self, index: int) -> Sample:
        group = int(self.sample_groups[index])
        return self._group(group).samples[index - self._first_sample[group]]


def _starts(counts: Sequence[int]) -> list[int]:
    """Where each run of items starts, and where the last one ends."""
    return [0, *np.cumsum(counts, dtype=np.int64).tolist()]
