"""Batches that are gathered as a whole, for an evaluation or a coordinator: no claim takes groups from such batches."""

from collections.abc import Iterable, Sequence

from rollq.buffer.calls.core import BufferCore, pairs
from rollq.buffer.calls.replies.batches import BatchState
from rollq.buffer.errors import BatchOver
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Prompt
from rollq.buffer.wire.prompts import encode_prompt

MAX_FILL = 500
"""The most prompts in one call."""


class Batches(BufferCore):
    """Calls that read and fill batches that another role opened."""

    def fill_batch(self, task: str, handle: str, size: int, prompts: Sequence[Prompt], *, last: bool) -> int:
        """Add up to `MAX_FILL` prompts to a batch of `size` groups; returns the batch's new size. Harmless to repeat.

        Raises `BatchOver`, `ServerRefused` when memory is full.
        """
        encoded = [encode_prompt(prompt) for prompt in prompts[:MAX_FILL]]
        closed = int(last and len(prompts) <= MAX_FILL)
        return int(self.call_task("fill_batch", task, handle, size, closed, *encoded))

    def batch(self, task: str, batch_id: str) -> BatchState | None:
        """The latest batch with this id; None if there was none, or if 200 batches have ended since then."""
        handle = self.send("HGET", task_keys(self.run, task).batches, batch_id)
        return None if handle is None else self.batch_by_handle(task, handle.decode())

    def running_batches(self, task: str) -> list[BatchState]:
        """A task's running batches, filled or not."""
        handles = self.send("HVALS", task_keys(self.run, task).batches)
        keys = task_keys(self.run, task)
        replies = self.send_all([("HGETALL", keys.batch(handle.decode())) for handle in handles])
        states = [_state(handle.decode(), pairs(raw)) for handle, raw in zip(handles, replies, strict=True) if raw]
        return [state for state in states if state.state == "running"]

    def batch_by_handle(self, task: str, handle: str) -> BatchState:
        """The state of a batch. Raises `BatchOver` if there is no such batch."""
        raw = self.send("HGETALL", task_keys(self.run, task).batch(handle))
        if not raw:
            raise BatchOver(f"task {task!r} has no batch {handle!r}")
        return _state(handle, raw.items())


def _state(handle: str, raw: Iterable[tuple[bytes, bytes]]) -> BatchState:
    fields = {name.decode(): value.decode() for name, value in raw}
    return BatchState(
        batch_id=fields["id"],
        handle=handle,
        state=fields["state"],
        kind=fields["type"],
        step=int(fields["step"]),
        epoch=int(fields["epoch"]),
        version=int(fields["version"]),
        size=int(fields["size"]),
        closed=fields["closed"] == "1",
        gathered=int(fields.get("gathered", 0)),
        filtered=int(fields.get("filtered", 0)),
        failed=int(fields.get("failed", 0)),
        left=int(fields.get("left", 0)),
    )
