"""The replies about batches of a coordinator."""

from dataclasses import dataclass
from typing import NamedTuple

from rollq.buffer.calls.replies.claims import ClaimedGroup


@dataclass(frozen=True, slots=True)
class BatchState:
    """A batch of groups that is gathered as a whole; `handle` names this incarnation of `batch_id`.

    `state` is running, finalizing, finalized or aborted. `size` is the number of its groups so far; with `closed`, it
    is final. `gathered`, `filtered` and `failed` count its finished groups, and `left` counts groups that left it
    unfinished when it was cut off. `epoch` and `version` are the live weights when it began.
    """

    batch_id: str
    handle: str
    state: str
    kind: str
    step: int
    epoch: int
    version: int
    size: int
    closed: bool
    gathered: int
    filtered: int
    failed: int
    left: int

    @property
    def complete(self) -> bool:
        """Whether all its groups are finished or have left it."""
        return self.closed and self.gathered + self.filtered + self.failed + self.left >= self.size


class Finalizing(NamedTuple):
    """The progress of ending a batch. The state is `finalizing`, with the finished groups, if this caller is ending the
    batch, and `busy` if another caller is. If it is `finalized` or `aborted`, the batch has ended, with its `result`
    (JSON, or the reason)."""

    state: str
    result: bytes
    groups: tuple[ClaimedGroup, ...] = ()
