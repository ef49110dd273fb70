"""The replies about batches of a coordinator."""

from dataclasses import dataclass
from typing import NamedTuple

from rollq.buffer.calls.replies.claims import ClaimedGroup


@dataclass(frozen=True, slots=True)
class BatchState:
    """A batch of groups that is gathered as a whole; `handle` names this incarnation of `batch_id`.

    `state`: running, finalizing, finalized or aborted. `size`: its groups so far; with `closed`, its final number.
    `gathered`, `filtered`, `failed`: its groups that are finished; `left`: groups that left it unfinished when it was
    cut off. `epoch`, `version`: the live weights when it began.
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
    """The progress of ending a batch. `finalizing`: the caller has it, with its finished groups; `busy`: another caller
    has it; `finalized` or `aborted`: it has ended, with its `result` (JSON, or the reason)."""

    state: str
    result: bytes
    groups: tuple[ClaimedGroup, ...] = ()
