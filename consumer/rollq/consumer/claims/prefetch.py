"""Reads groups of the next batch while the current batch is trained.

It never changes a claim. Wrong guesses are dropped.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from rollq.buffer.calls.replies.claims import ClaimedGroup
from rollq.buffer.errors import CorruptFrame, CorruptGroup, RollqError, ServerError
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.values.rollouts import Group
from rollq.buffer.values.sample_columns import Samples
from rollq.buffer.wire.sample_rows import SampleRows
from rollq.consumer.batches import packing

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
LEAST_OFTEN_S = 10.0
"""A look costs the server up to a few milliseconds, so looks become rarer while they find nothing new."""
GROUPS_PER_READ = 8
"""A claim waits for at most one read of this size."""

_Key = tuple[str, int, str]
"""Task, group id, and the nonce of the lease that made the samples. Samples under one key never change."""


class _Wanted(NamedTuple):
    group: ClaimedGroup
    size_bytes: int  # of its frame


class _Kept(NamedTuple):
    group: Group
    size_bytes: int  # of its frame, which its arrays keep in memory


class Prefetch:
    """Keeps up to `limit_bytes` of groups that one rank's next claim is likely to take."""

    def __init__(
        self,
        buffer: Callable[[], TrainerBuffer],
        sizes: Callable[[int], Mapping[str, int]],
        *,
        limit_bytes: int,
        rank: int,
        world_size: int,
        seed: int = 0,
    ) -> None:
        """`buffer` returns the buffer, or raises the error that ended it. `sizes` returns a step's groups per task."""
        self._buffer = buffer
        self._sizes = sizes
        self._limit_bytes = limit_bytes
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._kept: dict[_Key, _Kept] = {}
        self._corrupt: set[tuple[str, int]] = set()
        self._in_flight: set[_Key] = set()  # groups that the thread is reading
        self._step: int | None = None
        self._closed = False
        self._changed = threading.Condition()  # guards all of these
        self._thread = threading.Thread(target=self._run, name="rollq-prefetch", daemon=True)

    def begin(self, step: int) -> None:
        """Read groups for `step` from now on."""
        if self._limit_bytes == 0:
            return
        with self._changed:
            self._step = step
            self._changed.notify_all()
        if self._thread.ident is None:
            self._thread.start()

    def pause(self) -> None:
        """Start no further reads."""
        with self._changed:
            self._step = None
            self._changed.notify_all()

    def close(self) -> None:
        """Stop."""
        with self._changed:
            self._step, self._closed = None, True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def read(self, groups: Sequence[ClaimedGroup], rows: Sequence[SampleRows]) -> tuple[list[Group], int]:
        """Return the groups, in order, and how many were read ahead. `rows` holds the groups' rows. Raises
        `CorruptGroup`."""
        keys = [_key(group) for group in groups]
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight.isdisjoint(keys))  # waits rather than reading a group twice
            read_ahead = [self._kept.pop(key, None) for key in keys]
        missing = [index for index, at_hand in enumerate(read_ahead) if at_hand is None]
        late = iter(_fetch(self._buffer(), [groups[index] for index in missing], [rows[index] for index in missing]))
        read = [
            next(late) if at_hand is None else _as_claimed(at_hand.group, group)
            for group, at_hand in zip(groups, read_ahead, strict=True)
        ]
        return read, sum(at_hand is not None for at_hand in read_ahead)

    def _run(self) -> None:
        before, wait_s = None, LOOK_EVERY_S
        while (step := self._next_step()) is not None:
            has_read = self._look(step)
            wait_s = LOOK_EVERY_S if has_read or step != before else min(2 * wait_s, LEAST_OFTEN_S)
            before = step
            self._wait_while(step, wait_s)

    def _next_step(self) -> int | None:
        """Wait for a step to read ahead for; None when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._step is not None)
            return None if self._closed else self._step

    def _wait_while(self, step: int, wait_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._step != step, wait_s)

    def _look(self, step: int) -> bool:
        """Read the groups that a claim of `step` would take, and drop others. Returns whether anything was read."""
        try:
            wanted = {key: group for group in self._likely(step) if (key := _key(group))[:2] not in self._corrupt}
            with self._changed:
                self._kept = {key: group for key, group in self._kept.items() if key in wanted}
                missing = [group for key, group in wanted.items() if key not in self._kept]
            sizes_bytes = self._buffer().sizes_bytes(missing)
            return self._read_ahead(
                step, [_Wanted(*wanted_group) for wanted_group in zip(missing, sizes_bytes, strict=True)]
            )
        except CorruptGroup as error:  # the claim raises it again
            self._corrupt.add((error.task, error.group_id))
            return True
        except ServerError as error:
            log.debug("no groups are read ahead for now: %s", error)
        except RollqError as error:
            log.debug("groups are no longer read ahead: %s", error)
            self.pause()
        except Exception:  # a claim must not depend on this thread
            log.exception("no groups are read ahead for step %d", step)
            self.pause()
        return False

    def _read_ahead(self, step: int, missing: Sequence[_Wanted]) -> bool:
        """Read these groups in order, as long as they fit. Returns whether anything was read."""
        start = 0
        while chosen := self._choose(step, missing[start : start + GROUPS_PER_READ]):
            self._keep(chosen)
            start += len(chosen)
        return start > 0

    def _choose(self, step: int, missing: Sequence[_Wanted]) -> list[_Wanted]:
        """Return the first of these groups that fit, and mark them as in flight."""
        with self._changed:
            if self._step != step:
                return []
            held_bytes = sum(held.size_bytes for held in self._kept.values())
            totals_bytes = list(accumulate([candidate.size_bytes for candidate in missing], initial=held_bytes))[1:]
            chosen = [
                candidate for candidate, total in zip(missing, totals_bytes, strict=True) if total <= self._limit_bytes
            ]
            self._in_flight = {_key(candidate.group) for candidate in chosen}
            return chosen

    def _keep(self, chosen: Sequence[_Wanted]) -> None:
        """Read groups that are in flight, and keep them."""
        new: dict[_Key, _Kept] = {}
        try:
            wanted_groups = [wanted.group for wanted in chosen]
            groups = _fetch(self._buffer(), wanted_groups, list(map(decode_rows, wanted_groups)))
            new = {
                _key(wanted.group): _Kept(group, wanted.size_bytes)
                for wanted, group in zip(chosen, groups, strict=True)
            }
        finally:
            with self._changed:
                self._kept |= new
                self._in_flight = set()
                self._changed.notify_all()

    def _likely(self, step: int) -> list[ClaimedGroup]:
        """The groups that this rank's share would have if the batch of `step` were claimed now."""
        sizes = self._sizes(step)
        groups = self._buffer().preview(step, sizes, seed=self._seed)
        if self._world_size == 1:
            return groups
        if len(groups) < sum(sizes.values()):
            return []  # the shares would differ
        lengths = [rows.lengths for rows in map(decode_rows, groups)]
        return [groups[index] for index in packing.groups_of_share(lengths, self._rank, self._world_size)]


def _key(group: ClaimedGroup) -> _Key:
    return group.task, group.group_id, group.nonce


def _fetch(buffer: TrainerBuffer, groups: Sequence[ClaimedGroup], rows: Sequence[SampleRows]) -> list[Group]:
    """Read the groups from the store. Raises `CorruptGroup`, including for samples that do not match their rows."""
    fetched = buffer.fetch(groups)
    for group, of_group in zip(fetched, rows, strict=True):
        if SampleRows.of(Samples.of(group.samples)) != of_group:
            raise CorruptGroup(group.task, group.group_id, "its samples do not match its rows")
    return fetched


def decode_rows(group: ClaimedGroup) -> SampleRows:
    """The rows of a group. Raises `CorruptGroup`."""
    try:
        return SampleRows.decode(group.rows)
    except CorruptFrame as error:
        raise CorruptGroup(group.task, group.group_id, str(error)) from error


def tokens_of(group: ClaimedGroup) -> int:
    """The number of tokens in a group's sequences or, without readable rows, in its responses."""
    try:
        return sum(map(sum, decode_rows(group).lengths))
    except CorruptGroup:
        return group.tokens


def _as_claimed(group: Group, claimed: ClaimedGroup) -> Group:
    """The group with the claim's values."""
    return replace(
        group,
        oldest_version=claimed.oldest_version,
        arrival=claimed.arrival,
        tries=claimed.tries,
        shaped=claimed.shaped,
    )
