"""Holds a worker's leases, renews them in one call, and gives them up in time.

Invariant: generation for a group continues only while the lease is known to be valid, and no longer than an attempt may
take. The local deadline counts from before the call that set the deadline in Redis, so it is never later than Redis's,
and a worker that is cut off stops in time. A finished result is put even after the deadline, and the buffer decides
whether to accept it.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic

from rollq.buffer.values.rollouts import Lease, Sample
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.protocol import Request
from rollq.workers.groups.attempt_traces import AttemptTrace
from rollq.workers.groups.timeouts import AttemptTimeouts
from rollq.workers.wake_signals import Signals

log = logging.getLogger(__name__)

CHECKS_PER_RENEWAL = 4
MAX_CHECK_S = 1.0


class StopReason(StrEnum):
    """The reason why a group was stopped."""

    GONE = "its lease was taken over"
    UNRENEWED = "its lease could not be renewed in time"
    TIMEOUT = "the attempt took too long"
    PAUSED = "its task is paused"
    UNKEPT = "nothing more of it can be kept"
    BATCH_OVER = "its batch was cut off"


@dataclass(slots=True, eq=False)
class HeldLease:
    """A held lease, requested at `asked_s` and valid until `deadline_s` (both monotonic).

    `started` is true once the group's task has run its first step, and `finished` is true once the group is being
    stopped, put or handed back. `requests` holds the group's requests in the engine, with the index of each request's
    sample. `looping` holds samples whose agent loop has not ended. `open` counts samples still to be generated, and
    `behind` counts generated samples (see `Places`). `placed` is true once a sample has had a place. `expected_tokens`
    is the answers' expected length, 0.0 while unknown. `parts` counts the samples' salvaged parts. `salvages` is true
    while the buffer keeps parts, and `is_full` is true if it has too many parts to keep more. `kept` holds each
    sample's last salvaged state, and `made` holds all samples' current state. `cut_off` is true if the batch waits only
    for finished samples. `given_up` holds samples to lend that this worker has not released yet, `away` holds samples
    that are offered or lent, and `staying` holds samples that came back unfinished and are not lent again.
    `offer_calls` counts the calls that have offered samples or withdrawn offers.
    """

    lease: Lease
    asked_s: float
    deadline_s: float
    task: "asyncio.Task[None] | None" = None
    started: bool = False
    finished: bool = False
    cut: StopReason | None = None
    requests: dict[Request, int] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    away: set[int] = field(default_factory=set)
    staying: set[int] = field(default_factory=set)
    offer_calls: int = 0
    trace: AttemptTrace | None = None
    looping: set[int] = field(default_factory=set)
    open: int = 0
    behind: int = 0
    placed: bool = False
    expected_tokens: float = 0.0
    parts: int = 0
    salvages: bool = True
    is_full: bool = False
    kept: dict[int, Sample] = field(default_factory=dict)
    made: list[Sample] = field(default_factory=list)
    cut_off: bool = False


def _key(lease: Lease) -> tuple[str, int, str]:
    return lease.task, lease.group_id, lease.nonce


class LeaseTable:
    """A worker's leases. Sets the signal `room` when a group leaves the engine or the worker, and `cut_off` when a
    group's batch is cut off."""

    def __init__(
        self, calls: BufferCalls, lease_s: Mapping[str, float], timeouts: AttemptTimeouts, signals: Signals
    ) -> None:
        """`lease_s` is the length of each task's leases, in seconds."""
        self._calls = calls
        self._signals = signals
        self._lease_s = lease_s
        self._timeouts = timeouts
        self._expected = 0
        self._period_s = min(lease_s.values()) / 3
        self._held: dict[tuple[str, int, str], HeldLease] = {}
        self._generating: set[HeldLease] = set()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def generating(self) -> int:
        """The number of groups that still need the engine; the others are being judged and put."""
        return len(self._generating)

    @property
    def idle(self) -> bool:
        """Whether no lease is held or on its way."""
        return not self._held and not self._expected

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Mark leases as on their way, so that the table is not idle."""
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1

    def __iter__(self) -> Iterator[HeldLease]:
        return iter(list(self._held.values()))

    def add(self, lease: Lease, asked_s: float) -> HeldLease:
        """Add a lease requested at `asked_s` (monotonic)."""
        deadline_s = asked_s + self._lease_s[lease.task]
        held = HeldLease(lease, asked_s, deadline_s, parts=lease.parts, expected_tokens=lease.expected_tokens)
        self._held[_key(lease)] = held
        self._generating.add(held)
        held.cut_off = lease.cut_off
        return held

    def remove(self, held: HeldLease) -> None:
        """Forget a lease whose group has ended."""
        self._held.pop(_key(held.lease), None)
        self.note_generated(held)

    def note_generated(self, held: HeldLease) -> None:
        """Free the group's room in the engine: the group only needs to be judged and put."""
        self._generating.discard(held)
        self._signals.room.set()

    async def run(self) -> None:
        """Until cancelled, renew leases after a third of their length and when a batch ends, and stop groups past their
        deadline."""
        renewing: asyncio.Task[None] | None = None
        renewed_s, is_due = monotonic(), False
        while True:
            is_due |= await self._signals.batches.wait(min(MAX_CHECK_S, self._period_s / CHECKS_PER_RENEWAL))
            now_s = monotonic()
            is_due |= now_s - renewed_s >= self._period_s
            self._cut_off(now_s)
            if renewing is not None and renewing.done():
                renewing.result()
                renewing = None
            if renewing is None and self._held and is_due:
                renewed_s, is_due = now_s, False
                renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        held = list(self._held.values())
        asked_s = monotonic()
        leases = [entry.lease for entry in held]
        renewed = await self._calls(self._calls.buffer.renew, leases)
        gone, cut_off = ({_key(lease) for lease in listed} for listed in renewed)
        for entry in held:
            if _key(entry.lease) in gone:
                self.stop(entry, StopReason.GONE)
            else:
                entry.deadline_s = asked_s + self._lease_s[entry.lease.task]
                entry.cut_off = _key(entry.lease) in cut_off
        if cut_off:
            self._signals.cut_off.set()

    def renew_in_thread(self) -> None:
        """Renew leases that are due while the event loop is blocked. Called in another thread."""
        asked_s = monotonic()
        due = [entry for entry in self if not entry.finished and self._is_due(entry, asked_s)]
        if not due:
            return
        renewed = self._calls.buffer.renew([entry.lease for entry in due])
        gone = {_key(lease) for lease in renewed.gone}
        for entry in due:
            if _key(entry.lease) not in gone:
                entry.deadline_s = asked_s + self._lease_s[entry.lease.task]

    def _is_due(self, held: HeldLease, now_s: float) -> bool:
        """Whether half of a lease has passed."""
        return held.deadline_s - now_s < self._lease_s[held.lease.task] / 2

    def _cut_off(self, now_s: float) -> None:
        for held in list(self._held.values()):
            if now_s >= held.deadline_s:
                self.stop(held, StopReason.UNRENEWED)
            elif now_s >= held.asked_s + self._timeouts.of(held.lease):
                self.stop(held, StopReason.TIMEOUT)

    @staticmethod
    def stop(held: HeldLease, cut: StopReason) -> None:
        """Stop a group that has started and is not finished."""
        if (
            held.finished or held.task is None or not held.started
        ):  # a task cancelled before its first step could not hand back its lease
            return
        level = logging.INFO if cut is StopReason.BATCH_OVER else logging.WARNING
        log.log(level, "stopped group %d of task %r: %s", held.lease.group_id, held.lease.task, cut)
        held.cut, held.finished = cut, True
        held.task.cancel()
