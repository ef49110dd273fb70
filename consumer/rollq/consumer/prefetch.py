"""Reads groups of the next batch while the present one is trained.

A claim is not changed by it: it takes what it would have taken. Groups that were guessed wrongly are read again.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rollq.buffer.errors import CorruptFrame, CorruptGroup, RollqError, ServerError
from rollq.buffer.replies import ClaimedGroup
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.rollouts import Group
from rollq.buffer.samples import Samples
from rollq.buffer.wire.rows import SampleRows
from rollq.consumer import packing

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
GROUPS_PER_READ = 8
"""A claim waits for one read at most."""

_Key = tuple[str, int, str]
"""Task, group id, and the nonce of the lease that made its samples: they never change."""


class _Kept(NamedTuple):
    group: Group
    size_bytes: int


class Prefetch:
    """Keeps up to `limit_bytes` of groups that the claim of a step is likely to take, for one rank."""

    def __init__(
        self,
        buffer: Callable[[], TrainerBuffer],
        sizes: Callable[[int], Mapping[str, int]],
        *,
        limit_bytes: int,
        rank: int,
        world_size: int,
    ) -> None:
        """`buffer` gives the buffer, or raises why there is none any more; `sizes` the groups per task of a step."""
        self._buffer = buffer
        self._sizes = sizes
        self._limit_bytes = limit_bytes
        self._rank = rank
        self._world_size = world_size
        self._kept: dict[_Key, _Kept] = {}
        self._corrupt: set[tuple[str, int]] = set()
        self._step: int | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="rollq-prefetch", daemon=True)

    def begin(self, step: int) -> None:
        """Read groups for `step` from now on."""
        if self._limit_bytes == 0:
            return
        with self._changed:
            self._step = step
            self._changed.notify()
        if self._thread.ident is None:
            self._thread.start()

    def pause(self) -> None:
        """Begin no more reads."""
        with self._changed:
            self._step = None
            self._changed.notify()

    def close(self) -> None:
        """Stop."""
        with self._changed:
            self._step, self._closed = None, True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def read(self, groups: Sequence[ClaimedGroup]) -> tuple[list[Group], int]:
        """The groups, in order, and how many of them were here already. Raises CorruptGroup."""
        with self._reading:  # what is being read now is not read twice
            kept = [self._kept.pop(_key(group), None) for group in groups]
        missing = [group for group, at_hand in zip(groups, kept, strict=True) if at_hand is None]
        late = iter(_fetch(self._buffer(), missing))
        found = [
            next(late) if at_hand is None else _as_claimed(at_hand.group, group)
            for group, at_hand in zip(groups, kept, strict=True)
        ]
        return found, sum(at_hand is not None for at_hand in kept)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._step is None and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                step = self._step
            assert step is not None
            self._look(step)
            with self._changed:
                if self._step == step:
                    self._changed.wait(LOOK_EVERY_S)

    def _look(self, step: int) -> None:
        """Read what a claim of `step` would take, and drop what it would not."""
        try:
            wanted = {key: group for group in self._likely(step) if (key := _key(group))[:2] not in self._corrupt}
            with self._reading:
                self._kept = {key: kept for key, kept in self._kept.items() if key in wanted}
            missing = [group for key, group in wanted.items() if key not in self._kept]
            while missing and (count := self._keep(step, missing)):
                missing = missing[count:]
        except CorruptGroup as error:  # the claim meets it again
            self._corrupt.add((error.task, error.group_id))
        except ServerError as error:
            log.debug("no groups are read ahead for now: %s", error)
        except RollqError as error:
            log.debug("no groups are read ahead any more: %s", error)
            self.pause()
        except Exception:  # a claim must not depend on this thread
            log.exception("no groups are read ahead for step %d", step)
            self.pause()

    def _likely(self, step: int) -> list[ClaimedGroup]:
        """The groups of this rank's share, if the batch of `step` were claimed now."""
        sizes = self._sizes(step)
        groups = self._buffer().preview(step, sizes)
        if self._world_size == 1:
            return [group for group in groups if group.nonce]
        if len(groups) < sum(sizes.values()) or not all(group.rows for group in groups):
            return []  # the shares would be others
        rows = map(decode_rows, groups)
        lengths = [[length for sample in mine.lengths for length in sample] for mine in rows]
        return [groups[index] for index in packing.groups_of_share(lengths, self._rank, self._world_size)]

    def _keep(self, step: int, groups: Sequence[ClaimedGroup]) -> int:
        """Read the first ones of these groups; returns how many, 0 when there is enough."""
        with self._reading:
            sizes = [kept.size_bytes for kept in self._kept.values()]
            free_bytes = self._limit_bytes - sum(sizes)
            if self._step != step or free_bytes <= 0:
                return 0
            count = free_bytes // max(sizes, default=self._limit_bytes)  # the first one is read alone
            chosen = groups[: min(max(count, 1), GROUPS_PER_READ)]
            for group, found in zip(chosen, _fetch(self._buffer(), chosen), strict=True):
                self._kept[_key(group)] = _Kept(found, _size_bytes(found))
        return len(chosen)


def _key(group: ClaimedGroup) -> _Key:
    return group.task, group.group_id, group.nonce


def _fetch(buffer: TrainerBuffer, groups: Sequence[ClaimedGroup]) -> list[Group]:
    """The groups, from the store. Raises `CorruptGroup`, also where samples are not those that their rows describe."""
    found = buffer.fetch(groups)
    for group, claimed in zip(found, groups, strict=True):
        if claimed.rows and SampleRows.of(Samples.of(group.samples)) != decode_rows(claimed):
            raise CorruptGroup(group.task, group.group_id, "its samples are not those that its rows describe")
    return found


def decode_rows(group: ClaimedGroup) -> SampleRows:
    """The rows of a group that has some. Raises `CorruptGroup`."""
    try:
        return SampleRows.decode(group.rows)
    except CorruptFrame as error:
        raise CorruptGroup(group.task, group.group_id, str(error)) from error


def _size_bytes(group: Group) -> int:
    """The bytes of a group's arrays."""
    segments = [segment for mine in Samples.of(group.samples).segments for segment in mine]
    arrays = [
        array
        for segment in segments
        for array in (segment.prompt_ids, segment.response_ids, segment.logprobs, *segment.arrays.values())
    ]
    different = {id(array): array for array in arrays}  # siblings share prompts
    return sum(array.nbytes for array in different.values() if isinstance(array, np.ndarray))


def _as_claimed(group: Group, claimed: ClaimedGroup) -> Group:
    """The group, with what the claim says of it."""
    return replace(
        group,
        oldest_version=claimed.oldest_version,
        arrival=claimed.arrival,
        tries=claimed.tries,
        shaped=claimed.shaped,
    )
