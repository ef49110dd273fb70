"""Whole groups as the server stores them, with their frames."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rollq.buffer.calls.core import BufferCore, pairs
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import WHOLE


class Stored(NamedTuple):
    """A group as the server stores it; without `fields`, the group is not in the buffer. `frames` maps fields to
    frames."""

    group_id: int
    fields: Mapping[bytes, bytes]
    frames: dict[str, bytes]


class ReadingStored(BufferCore):
    """The call that reads whole groups."""

    def stored_groups(self, task: str, ids: Sequence[int]) -> list[Stored]:
        """The groups, in order, each read at one instant. `frames` lacks external payloads."""
        clock_key = task_keys(self.run, task).clock
        replies = self.call_all([("save_group", clock_key, self.incarnation, group_id) for group_id in ids])
        return [
            Stored(
                group_id, dict(pairs(fields)), {name.decode(): frame for name, frame in pairs(frames)} | whole(payload)
            )
            for group_id, (fields, frames, payload) in zip(ids, replies, strict=True)
        ]


def whole(payload: bytes | None) -> dict[str, bytes]:
    """The frame in a group's payload, by its field; empty without a payload."""
    return {WHOLE: payload} if payload else {}


def texts(stored: Any, leave_out: Collection[bytes] = ()) -> dict[str, str]:
    """Decode a hash from the driver or a function, without the fields in `leave_out`."""
    items = stored.items() if isinstance(stored, Mapping) else pairs(stored)
    return {text(name): text(value) for name, value in items if name not in leave_out}


def text(value: bytes) -> str:
    """Decode a stored text; bytes that are not UTF-8 are replaced."""
    return value.decode(errors="replace")
