"""The archiver's calls: groups that leave the buffer, in portions that are fixed before they are written."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollq.buffer.calls.stored_groups import ReadingStored, texts, whole
from rollq.buffer.common.portions import slices
from rollq.buffer.payloads.interface import PayloadName
from rollq.buffer.store.keys import task_keys

MAX_PORTION_GROUPS = 1000
GROUPS_PER_TRIP = 32
ARCHIVER_LEASE_MS = 30_000
"""How long after its last call an archiver keeps other archivers off a task, in ms. Safety depends only on portions."""
_AT_WORK = -1


class Portion(NamedTuple):
    """Groups for one archive file: train step `step` trained them, or they left during that step."""

    task: str
    number: int
    step: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as the buffer stores it: the fields of its hash, and its frames by field."""

    task: str
    group_id: int
    fields: Mapping[str, str]
    prompt: bytes
    frames: Mapping[str, bytes]


class Archiving(ReadingStored):
    """Calls of archivers. All are harmless to repeat, even by several archivers."""

    def take_to_archive(
        self, task: str, archiver: str, *, most: int, wait_s: float, trouble: str = ""
    ) -> Portion | None:
        """Return the next file's groups; None without any, or while another archiver holds the task.

        Groups that left at the current step wait `wait_s` for others, unless there are `most` groups. The portion stays
        the same for all archivers until `forget_archived`. For display, `trouble` says why the last portion is not
        written.
        """
        most = min(most, MAX_PORTION_GROUPS)
        wait_ms = round(wait_s * 1000)
        reply = self.call_task("take_to_archive", task, archiver, ARCHIVER_LEASE_MS, most, wait_ms, trouble)
        number, step, *ids = reply
        return None if number in (0, _AT_WORK) else Portion(task, number, step, tuple(map(int, ids)))

    def is_waiting(self, portion: Portion) -> bool:
        """Whether a portion still has to be archived: none of its groups is missing."""
        number, ids = self.send("HMGET", task_keys(self.run, portion.task).archive, "number", "ids")
        return ids is not None and int(number) == portion.number

    def forget_archived(self, portion: Portion) -> bool:
        """Remove an archived portion's groups. Returns False while the buffer is being saved: call again."""
        return bool(self.call_task("forget_archived", portion.task, portion.number))

    def leave_audit(self, task: str) -> int:
        """Send the groups kept for audit to the archive; returns how many."""
        left = total = int(self.call_task("leave_audit", task, MAX_PORTION_GROUPS // 2))
        while left:
            left = int(self.call_task("leave_audit", task, MAX_PORTION_GROUPS // 2))
            total += left
        return total

    def read_stored(self, task: str, ids: Sequence[int]) -> Iterator[StoredGroup]:
        """Yield groups with their frames, in order, without deleted groups."""
        for trip in slices(ids, GROUPS_PER_TRIP):
            yield from self._read_stored(task, trip)

    def _read_stored(self, task: str, ids: Sequence[int]) -> Iterator[StoredGroup]:
        groups = [group for group in self.stored_groups(task, ids) if group.fields]
        named = {group.group_id: group.fields.get(b"payload", b"").decode() for group in groups}
        away = {group_id: name for group_id, name in named.items() if PayloadName.parse(task, name)}
        payloads = self.read_payloads(task, away)
        for group_id, fields, frames in groups:
            frames |= whole(payloads.get(group_id))
            yield StoredGroup(task, group_id, texts(fields, leave_out=_BYTES), fields.get(b"prompt", b""), frames)


_BYTES: frozenset[Any] = frozenset({b"prompt", b"rows"})
