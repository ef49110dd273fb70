"""The replies about a coordinator's batches."""

from dataclasses import dataclass
from typing import NamedTuple

from rollq.buffer.calls.replies.claims import ClaimedGroup


@dataclass(frozen=True, slots=True)
class BatchState:
    """A batch of groups that is gathered as a whole; `handle` names this incarnation of `batch_id`.

    `state` is running, finalizing, finalized or aborted. `size` is the number of groups so far; with `closed`, it is
    final. `gathered`, `filtered` and `failed` count finished groups, and `left` counts groups that left unfinished when
    the batch was cut off. `epoch` and `version` identify the weights that were live when the batch began.
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
        """Whether all groups are finished or have left the batch."""
        return self.closed and self.gathered + self.filtered + self.failed + self.left >= self.size


class Finalizing(NamedTuple):
    """The progress of ending a batch. `state` is `finalizing` if this caller is ending the batch; `groups` then holds
    the finished groups. It is `busy` if another caller is ending the batch, and `finalized` or `aborted` if the batch
    has ended with this `result` (JSON, or the reason)."""

    state: str
    result: bytes
    groups: tuple[ClaimedGroup, ...] = ()
