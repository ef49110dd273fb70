"""Batches that are gathered as a whole, an evaluation or a coordinator's: no claim takes a group out of one."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import orjson

from rollq.buffer.core import BufferCore, pairs, task_keys
from rollq.buffer.replies import BatchState, ClaimedGroup, Finalizing
from rollq.buffer.rollouts import PipelineOutput, Prompt
from rollq.buffer.store.functions import BatchOver
from rollq.buffer.wire.prompts import encode_prompt

BatchType = Literal["train", "eval"]
MAX_FILL = 500
"""Prompts of one call."""


class Batches(BufferCore):
    """Calls of coordinators, and of the trainer for its evaluations."""

    def open_batch(self, task: str, batch_id: str, kind: BatchType, *, step: int, digest: str = "") -> BatchState:
        """Begin a batch, or return the one that stands under this id with the same `digest` of its content.

        An evaluation is of the version that is live now, in a task of kind eval. Raises `BatchRefused` (a ValueError).
        """
        handle, _ = self._call_task(
            "open_batch", task, batch_id, f"{batch_id}-{secrets.token_hex(8)}", kind, step, digest
        )
        return self.batch_by_handle(task, handle.decode())

    def fill_batch(self, task: str, handle: str, size: int, prompts: Sequence[Prompt], *, last: bool) -> int:
        """Add up to `MAX_FILL` prompts to a batch that has `size` groups; returns its size now. Harmless to repeat.

        Raises `BatchOver`, `ServerRefused` when memory is full.
        """
        encoded = [encode_prompt(prompt) for prompt in prompts[:MAX_FILL]]
        closed = int(last and len(prompts) <= MAX_FILL)
        return int(self._call_task("fill_batch", task, handle, size, closed, *encoded))

    def begin_finalize(self, task: str, handle: str, nonce: str, *, lease_s: float) -> Finalizing:
        """Take a batch of type train for its pipeline; see `Finalizing`. `nonce`: who calls. Harmless to repeat."""
        state, result, *groups = self._call_task("begin_finalize", task, handle, nonce, round(lease_s * 1000))
        found = [
            ClaimedGroup(task, group_id, oldest, arrival, tries, tokens, float(reward or 0))
            for group_id, oldest, arrival, tries, tokens, reward in groups
        ]
        return Finalizing(state.decode(), result, tuple(found))

    def end_finalize(
        self, task: str, handle: str, nonce: str, result: bytes, shaped: Mapping[int, PipelineOutput | str]
    ) -> Finalizing:
        """File the groups of a batch: by id, what the pipeline gave it, or why it is filtered. `result` is kept.

        What is not finished joins the pool of interrupted groups. Returns what stands, perhaps by another process.
        """
        args = [item for group_id, given in shaped.items() for item in (group_id, *_encode_shaped(given))]
        state, stands = self._call_task("end_finalize", task, handle, nonce, "finalized", result, *args)
        return Finalizing(state.decode(), stands)

    def undo_finalize(self, task: str, handle: str, nonce: str) -> None:
        """Give a batch back after its pipeline failed: it is running again, with every result still there."""
        self._call_task("end_finalize", task, handle, nonce, "running", b"")

    def abort_batch(self, task: str, handle: str, reason: str, *, keep_finished: bool = False) -> int:
        """End a batch: unfinished groups are dropped, finished ones too unless they are kept, as completed.

        Returns how many were dropped; 0 for a batch that is over.
        """
        return int(self._call_task("abort_batch", task, handle, reason, int(keep_finished)))

    def batch(self, task: str, batch_id: str) -> BatchState | None:
        """The batch that stands, or stood last, under this id; None when there was none, or 200 have ended since."""
        handle = self._read(lambda: self.client.hget(task_keys(self.run, task).batches, batch_id))
        return None if handle is None else self.batch_by_handle(task, handle.decode())

    def running_batches(self, task: str) -> list[BatchState]:
        """The batches of a task that are under way, filled or not."""
        handles = self._read(lambda: self.client.hvals(task_keys(self.run, task).batches))
        keys = task_keys(self.run, task)
        found = self._read_all([("HGETALL", keys.batch(handle.decode())) for handle in handles])
        states = [_state(handle.decode(), pairs(raw)) for handle, raw in zip(handles, found, strict=True) if raw]
        return [state for state in states if state.state == "running"]

    def batch_by_handle(self, task: str, handle: str) -> BatchState:
        """Where a batch stands. Raises `BatchOver` when it is not there."""
        raw = self._read(lambda: self.client.hgetall(task_keys(self.run, task).batch(handle)))
        if not raw:
            raise BatchOver(f"batch {handle!r} of task {task!r} is not there")
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
    )


def _encode_shaped(given: PipelineOutput | str) -> tuple[bytes | str, int]:
    if isinstance(given, str):
        return given, 0
    return orjson.dumps({"rewards": given.rewards, "advantages": given.advantages}), 1
