"""Payloads of claimed groups: their prompts and samples, decoded while later ones arrive."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rollq.buffer.core import BufferCore, pairs
from rollq.buffer.errors import CorruptFrame, CorruptGroup
from rollq.buffer.replies import ClaimedGroup
from rollq.buffer.rollouts import WHOLE, Group
from rollq.buffer.store.keys import TaskKeys, task_keys
from rollq.buffer.store.pipelining import Command
from rollq.buffer.wire.payload import decode_group
from rollq.buffer.wire.prompts import decode_prompt

FETCH_GROUPS_PER_TRIP = 64


class Fetching(BufferCore):
    """Calls of those who read groups as a whole: the trainer, and the coordinator for its pipeline."""

    def fetch(self, groups: Sequence[ClaimedGroup]) -> list[Group]:
        """Read the payloads of claimed groups, in order. Raises CorruptGroup."""
        fetched: list[Group] = []
        for start in range(0, len(groups), FETCH_GROUPS_PER_TRIP):
            fetched += self._fetch(groups[start : start + FETCH_GROUPS_PER_TRIP])
        return fetched

    def sizes_bytes(self, groups: Sequence[ClaimedGroup]) -> list[int]:
        """The size of the frame that holds the samples of each group, which must have rows; 0 where it is gone."""
        return [int(size) for size in self.send_all([self._measure(group) for group in groups])]

    def _measure(self, group: ClaimedGroup) -> Command:
        keys = task_keys(self.run, group.task)
        if group.payload:
            return ("STRLEN", keys.payload(group.group_id, group.payload))
        return ("HSTRLEN", keys.rollout(group.group_id), WHOLE)

    def _fetch(self, groups: Sequence[ClaimedGroup]) -> list[Group]:
        commands: list[Command] = []
        for group in groups:
            keys = task_keys(self.run, group.task)
            commands += (("HGET", keys.group(group.group_id), "prompt"), _read_frames(keys, group))
        # each group is decoded while the next ones arrive
        decoded = self.send_all(commands, partial(self._decode_reply, groups))
        return [
            Group(*group[:2], prompt, samples, group.oldest_version, group.arrival, group.tries, group.shaped)
            for group, prompt, samples in zip(groups, decoded[::2], decoded[1::2], strict=True)
        ]

    def _decode_reply(self, groups: Sequence[ClaimedGroup], index: int, reply: Any) -> Any:
        """The prompt of a group, then its samples."""
        if isinstance(reply, Exception):
            raise reply
        group = groups[index // 2]
        if index % 2 == 0:
            if reply is None:
                raise CorruptGroup(group.task, group.group_id, "it is not in the store any more")
            try:
                return decode_prompt(reply)
            except CorruptFrame as error:
                raise CorruptGroup(group.task, group.group_id, str(error)) from error
        try:
            stored = _frames(group, reply)
            return decode_group(stored, group_size=self.rules(group.task).group_size)
        except CorruptFrame as error:
            raise CorruptGroup(group.task, group.group_id, str(error)) from error


def _read_frames(keys: TaskKeys, group: ClaimedGroup) -> Command:
    if group.payload:
        return ("GET", keys.payload(group.group_id, group.payload))
    return ("HGETALL", keys.rollout(group.group_id))


def _frames(group: ClaimedGroup, reply: Any) -> dict[str, bytes]:
    """The frames of a group by field. Raises `CorruptFrame` when its payload is gone."""
    if not group.payload:
        return {field.decode(errors="replace"): frame for field, frame in pairs(reply)}
    if reply is None:
        raise CorruptFrame("its samples are not in the store any more")
    return {WHOLE: reply}
