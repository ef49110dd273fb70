"""The replies to calls for leases, results and loans."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rollq.buffer.values.rollouts import Lease


class Reaped(NamedTuple):
    """Groups that were sent back, or quarantined, because their leases had run out. With `held`, no lease was ended,
    because an outage has just passed."""

    requeued: int
    quarantined: int
    held: bool


class Leased(NamedTuple):
    """A worker's leases. If `drain` is set, the worker must finish its leased groups before it leases again, since a
    suspect must run alone."""

    leases: tuple[Lease, ...]
    drain: bool


class Renewed(NamedTuple):
    """Leases that are no longer the caller's, and leases in batches that were cut off: only finished samples of these
    count (see `Coordination.cut_off`)."""

    gone: list[Lease]
    cut_off: list[Lease]


@dataclass(frozen=True, slots=True)
class Offer:
    """Samples of a leased group, by index: `added` to the offers to other workers, or `taken_back`.

    `number` counts the earlier calls for this lease that added samples or took some back.
    """

    lease: Lease
    number: int
    added: tuple[int, ...] = ()
    taken_back: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Offered:
    """A leased group's samples, by index, that are offered to other workers or lent to one.

    `parts` counts the group's sample parts in the buffer.
    """

    offered: frozenset[int]
    lent: frozenset[int]
    parts: int = 0


class PutOutcome(StrEnum):
    """The outcome of filing a result."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FILTERED = "filtered"
    FAILED = "failed"
    DROPPED = "dropped"  # too stale, and the task drops what expires
    DUPLICATE = "duplicate"  # this same result was filed before
    REFUSED = "refused"  # the lease is no longer the caller's
    GATHERED = "gathered"  # finished, for its batch
    RESTARTED = "restarted"  # its batch still needs it: pending again


class SalvageOutcome(StrEnum):
    """Whether a sample part was kept. If not, no later part in the same lease is kept either."""

    KEPT = "kept"
    FULL = "full"  # the group has `MOST_PARTS` or `MOST_PART_BYTES`
    REFUSED = "refused"  # the lease is no longer the caller's, or an earlier part is missing
