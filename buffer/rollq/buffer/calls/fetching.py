"""Payloads of claimed groups: their prompts and samples, decoded while later payloads arrive."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollq.buffer.calls.core import BufferCore, pairs
from rollq.buffer.calls.replies.claims import ClaimedGroup
from rollq.buffer.common.portions import slices
from rollq.buffer.errors import CorruptFrame, CorruptGroup
from rollq.buffer.payloads.interface import PayloadName
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.pipelining import Command
from rollq.buffer.values.rollouts import WHOLE, Group, Prompt
from rollq.buffer.values.sample_columns import Samples
from rollq.buffer.wire.group_fields import decode_group
from rollq.buffer.wire.prompts import decode_prompt

FETCH_GROUPS_PER_TRIP = 64


class Fetching(BufferCore):
    """Calls that read whole groups, for the trainer, and for the coordinator's pipeline."""

    def fetch(self, groups: Sequence[ClaimedGroup]) -> list[Group]:
        """The claimed groups, in order; payloads not sent with the claim are read. Raises `CorruptGroup`."""
        missing, read = [group for group in groups if not group.stored], list[Group]()
        for trip in slices(missing, FETCH_GROUPS_PER_TRIP):
            read += self._fetch(trip)
        in_order = iter(read)
        return [self._decode_stored(group) if group.stored else next(in_order) for group in groups]

    def sizes_bytes(self, groups: Sequence[ClaimedGroup]) -> list[int]:
        """For each group, the size of its samples' frame in bytes; 0 if the frame is gone."""
        here, away = _by_place(groups)
        by_index = dict(zip(away, self.payloads.sizes_bytes(list(away.values())), strict=True))
        by_index |= zip(here, self.send_all([self._measure(groups[index]) for index in here]), strict=True)
        return [int(by_index[index]) for index in range(len(groups))]

    def _measure(self, group: ClaimedGroup) -> Command:
        keys = task_keys(self.run, group.task)
        if group.payload:
            return ("STRLEN", keys.payload(group.group_id, group.payload))
        return ("HSTRLEN", keys.rollout(group.group_id), WHOLE)

    def _read_frames(self, group: ClaimedGroup) -> Command:
        keys = task_keys(self.run, group.task)
        if group.payload:
            return ("GET", keys.payload(group.group_id, group.payload))
        return ("HGETALL", keys.rollout(group.group_id))

    def _fetch(self, groups: Sequence[ClaimedGroup]) -> list[Group]:
        here, away = _by_place(groups)
        commands: list[Command] = [
            ("HGET", task_keys(self.run, group.task).group(group.group_id), "prompt") for group in groups
        ]
        commands += [self._read_frames(groups[index]) for index in here]

        def decode(index: int, reply: Any) -> Any:
            """Decode a reply: prompts of all groups first, then samples of `here`."""
            if index < len(groups):
                return _decode_prompt(groups[index], reply)
            return self._decode_samples(groups[here[index - len(groups)]], reply)

        # each group is decoded while later groups arrive
        decoded = self.send_all(commands, decode)
        samples: dict[int, Samples] = dict(zip(here, decoded[len(groups) :], strict=True))
        read = list(away)
        samples |= zip(
            read,
            self.payloads.read(
                list(away.values()), lambda number, payload: self._decode_samples(groups[read[number]], payload)
            ),
            strict=True,
        )
        return [
            _whole(group, prompt, samples[index])
            for index, (group, prompt) in enumerate(zip(groups, decoded, strict=False))
        ]

    def _decode_stored(self, group: ClaimedGroup) -> Group:
        """A group that came with its claim."""
        prompt, frame = group.stored
        return _whole(group, _decode_prompt(group, prompt), self._samples_of(group, {WHOLE: frame}))

    def _decode_samples(self, group: ClaimedGroup, reply: Any) -> Samples:
        if isinstance(reply, Exception):
            raise reply
        try:
            frames = _frames(group, reply)
        except CorruptFrame as error:
            raise CorruptGroup(group.task, group.group_id, str(error)) from error
        return self._samples_of(group, frames)

    def _samples_of(self, group: ClaimedGroup, frames: Mapping[str, bytes]) -> Samples:
        try:
            return decode_group(frames, group_size=self.rules(group.task).group_size)
        except CorruptFrame as error:
            raise CorruptGroup(group.task, group.group_id, str(error)) from error


def _whole(group: ClaimedGroup, prompt: Prompt, samples: Samples) -> Group:
    """A claimed group with its prompt and samples."""
    claim = (group.oldest_version, group.arrival, group.tries, group.shaped)
    return Group(group.task, group.group_id, prompt, samples, *claim)


def _by_place(groups: Sequence[ClaimedGroup]) -> tuple[list[int], dict[int, PayloadName]]:
    """The indices of groups with frames in their task's slot, and the other groups' payloads, by index."""
    names = [PayloadName.parse(group.task, group.payload) for group in groups]
    here = [index for index, name in enumerate(names) if name is None]
    return here, {index: name for index, name in enumerate(names) if name is not None}


def _decode_prompt(group: ClaimedGroup, reply: Any) -> Prompt:
    if isinstance(reply, Exception):
        raise reply
    if reply is None:
        raise CorruptGroup(group.task, group.group_id, "it is no longer in the store")
    try:
        return decode_prompt(reply)
    except CorruptFrame as error:
        raise CorruptGroup(group.task, group.group_id, str(error)) from error


def _frames(group: ClaimedGroup, reply: Any) -> dict[str, bytes]:
    """A group's frames, by field. Raises `CorruptFrame` if the group's payload is gone."""
    if not group.payload:
        return {field.decode(errors="replace"): frame for field, frame in pairs(reply)}
    if reply is None:
        raise CorruptFrame("its samples are no longer in the store")
    return {WHOLE: reply}
