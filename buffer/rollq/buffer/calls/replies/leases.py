"""The replies to calls for leases, results and loans."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rollq.buffer.values.rollouts import Lease


class Reaped(NamedTuple):
    """Groups whose leases were past their deadline: sent back, or quarantined. With `held`, no lease was ended, because
    an outage has just passed."""

    requeued: int
    quarantined: int
    held: bool


class Leased(NamedTuple):
    """The leases of a worker. If `drain` is set, the worker must finish its leased groups before it leases again, since
    a suspect must run alone."""

    leases: tuple[Lease, ...]
    drain: bool


class Renewed(NamedTuple):
    """Leases that are no longer the caller's, and leases of batches that no longer wait: only their finished samples
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
    """The samples of a leased group, by index, that are offered to other workers or lent to one.

    `parts` counts the parts of its samples in the buffer.
    """

    offered: frozenset[int]
    lent: frozenset[int]
    parts: int = 0


class PutOutcome(StrEnum):
    """The place where a result was filed."""

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
    """Whether a part of a sample was kept. If not, no later part of its lease is kept either."""

    KEPT = "kept"
    FULL = "full"  # the group has `MOST_PARTS` or `MOST_PART_BYTES`
    REFUSED = "refused"  # the lease is no longer the caller's, or an earlier part is missing
