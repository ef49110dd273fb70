"""Reads the groups of a claimed batch, and their rows."""

import logging
from collections.abc import Sequence

import numpy as np

from rollq.buffer.calls.replies.claims import ClaimedGroup
from rollq.buffer.errors import CorruptGroup
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.values.rollouts import Group, Prompt, Sample, SampleStatus, Segment
from rollq.buffer.wire.sample_rows import SampleRows
from rollq.consumer.claims.prefetch import Prefetch, decode_rows

log = logging.getLogger(__name__)


class GroupReader:
    """Reads the groups of one batch, if possible from groups read ahead.

    `unreadable` holds the groups that `read_share` has masked.
    """

    def __init__(self, groups: Sequence[ClaimedGroup], buffer: TrainerBuffer, prefetch: Prefetch) -> None:
        self._groups = list(groups)
        self._buffer = buffer
        self._prefetch = prefetch
        self._rows: list[SampleRows] = []
        self._present = 0  # how many of the groups were found to exist
        self._asked = self._hits = 0
        self.unreadable: list[tuple[str, int]] = []

    @property
    def prefetched(self) -> float:
        """The fraction of the groups returned so far that were read ahead."""
        return self._hits / self._asked if self._asked else 0.0

    def add(self, groups: Sequence[ClaimedGroup]) -> None:
        """Append groups of the batch."""
        self._groups += groups

    def rows(self) -> list[SampleRows]:
        """The rows of all groups. Raises `CorruptGroup`."""
        self._rows += map(decode_rows, self._groups[len(self._rows) :])
        return self._rows

    def read(self, indices: Sequence[int]) -> list[Group]:
        """The groups at these indices. Raises `CorruptGroup`, including for the rows of any group of the batch."""
        rows = self.rows()
        groups, hits = self._prefetch.read(
            [self._groups[index] for index in indices], [rows[index] for index in indices]
        )
        self._asked += len(indices)
        self._hits += hits
        return groups

    def read_share(self, indices: Sequence[int]) -> list[Group]:
        """The groups at these indices, one rank's share. Raises `CorruptGroup` when any group of the batch is gone.

        A group that only one rank finds unreadable cannot be replaced: the other ranks already train the batch. Such a
        group gets masked sequences with the lengths in its rows, so counts are equal on all ranks.
        """
        self._check_present()
        try:
            return self.read(indices)
        except CorruptGroup:
            return [self._read_or_mask(index) for index in indices]

    def _check_present(self) -> None:
        groups = self._groups[self._present :]
        for group, size_bytes in zip(groups, self._buffer.sizes_bytes(groups), strict=True):
            if size_bytes == 0:
                raise CorruptGroup(group.task, group.group_id, "its samples are no longer in the store")
        self._present = len(self._groups)

    def _read_or_mask(self, index: int) -> Group:
        # Masked, not left out: without the group, counts and thus all tokens' weights would differ between ranks.
        claimed = self._groups[index]
        try:
            (group,) = self.read([index])
        except CorruptGroup as error:
            log.error("%s; other ranks train the batch already, so its samples are masked", error)
            self.unreadable.append((claimed.task, claimed.group_id))
            return _masked(claimed, self._rows[index])
        return group


def _masked(claimed: ClaimedGroup, rows: SampleRows) -> Group:
    """A group with sequences of the same lengths, in which no token counts."""
    samples = [
        Sample(tuple([_masked_segment(length) for length in lengths]), SampleStatus.FAILED, error="it cannot be read")
        for lengths in rows.lengths
    ]
    facts = (claimed.oldest_version, claimed.arrival, claimed.tries, claimed.shaped)
    return Group(claimed.task, claimed.group_id, Prompt(""), samples, *facts)


def _masked_segment(length: int) -> Segment:
    ids = np.zeros(length, np.int32)
    return Segment(ids, ids[:0], np.zeros(0, np.float32), ())
