"""Leases for tickets: how many groups a worker takes, and when.

Invariant: groups are leased only while there is a place for one of their samples, the engine serves published weights,
and a task is open. While other workers want groups too, this worker leases at most its share, and more only after a
wait. A group on its last try, after workers died while running it, runs alone in the engine.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from functools import partial
from itertools import islice
from time import monotonic

from rollq.buffer.calls.replies.tasks import UnderWay
from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import StaleWorker
from rollq.buffer.tickets import Ticket
from rollq.buffer.values.rollouts import Lease
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.groups.attempt_traces import AttemptTraces
from rollq.workers.groups.fair_share import allowance, denied_for_s
from rollq.workers.groups.fleet_share import FleetShare
from rollq.workers.groups.group_runner import GroupRunner
from rollq.workers.groups.leases import HeldLease, LeaseTable
from rollq.workers.groups.lender import Lender
from rollq.workers.groups.places import AllPlaces
from rollq.workers.groups.sample_maker import UNFINISHED
from rollq.workers.groups.task_control import TaskControl
from rollq.workers.rq.in_flight import Taken
from rollq.workers.wake_signals import POLL_S, Signals

log = logging.getLogger(__name__)

MAX_TAKE = 256
"""The most groups per call: calls to the buffer stay short, and generation starts while further groups are leased."""

FRESH_S = 0.05
"""For this many seconds, a worker may take the groups that it was allowed when it asked for tickets."""


class TicketGroups:
    """The running groups that were leased for one ticket."""

    def __init__(self, held: Sequence[HeldLease]) -> None:
        self.groups = [f"{entry.lease.task}/{entry.lease.group_id}" for entry in held]
        self._held = held
        self._tasks = [entry.task for entry in held if entry.task is not None]
        self._left = len(self._tasks)
        self._all_ended = asyncio.Event()
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def run(self) -> None:
        """Wait for the groups. When cancelled, stop unfinished groups."""
        try:
            await self._all_ended.wait()
        except asyncio.CancelledError:
            for entry in self._held:
                if entry.task is not None and not entry.finished:
                    entry.task.cancel()
            await self._all_ended.wait()
            raise
        for task in self._tasks:
            task.result()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._left -= 1
        if self._left == 0:
            self._all_ended.set()


class Intake:
    """The `TicketHandler` of a rollq worker."""

    def __init__(
        self,
        calls: BufferCalls,
        host: EngineHost,
        table: LeaseTable,
        runner: GroupRunner,
        control: TaskControl,
        *,
        places: AllPlaces,
        fleet: FleetShare,
        lender: Lender,
        signals: Signals,
        traces: AttemptTraces,
        worker: str,
    ) -> None:
        self.stopped = False
        self.taking = asyncio.Lock()
        """The lock for asking for groups or samples, held until they have started: only a worker with no other request
        gets a group that must run alone."""
        self._calls = calls
        self._runner = runner
        self._table = table
        self._host = host
        self._control = control
        self._places = places
        self._fleet = fleet
        self._lender = lender
        self._signals = signals
        self._traces = traces
        self._worker = worker
        self._draining = False
        self._allowed = 0
        self._allowed_s = self._allowed_share = 0.0
        self._pending = False
        self._denied_since_s: float | None = None
        self._stale_versions = LogOnce(log)

    async def room(self) -> int:
        """Wait until groups may be taken, and return their number; 0 after `stop`."""
        while not self.stopped:
            wait_s = POLL_S
            if self.may_take():
                groups, wait_s = await self._allow()
                if groups:
                    return groups
            else:
                self._denied_since_s = None  # the worker waits for places, not for its share
            await self._signals.room.wait(wait_s)
        return 0

    async def _allow(self) -> tuple[int, float]:
        """Find out how many groups may be taken now. Returns the number of single-group tickets to take and, if 0,
        after how many seconds to ask again.

        If no group is pending, the worker may wait for one ticket, unless groups of some task have no room.
        """
        self._allowed, self._allowed_s, self._allowed_share = 0, monotonic(), self._fleet.share
        tasks, free = self._places.with_room(self._control.open_tasks)
        self._pending = True  # assumed until a lease shows otherwise
        if not tasks:
            return 0, POLL_S
        all_have_room = len(tasks) == len(self._control.open_tasks)
        if not self._fleet.share:
            await self._fleet.refresh()
        if self._fleet.share == 1.0 and all_have_room:
            self._denied_since_s = None
            self._allowed = min(free, MAX_TAKE)
            return self._allowed, 0.0
        under_way = await self._calls(self._calls.buffer.under_way, tasks)
        self._pending = under_way.pending > 0
        if not self._pending:
            self._denied_since_s = None
            return int(all_have_room), POLL_S
        held = sum(entry.lease.task in tasks and not entry.lease.borrowed for entry in self._table)
        share, wait_s = self._share_of(under_way, held, monotonic())
        self._allowed = min(free, share, MAX_TAKE)
        return self._allowed, wait_s

    @property
    def _is_fresh(self) -> bool:
        share = self._fleet.share
        return share == self._allowed_share and (share == 1.0 or monotonic() - self._allowed_s < FRESH_S)

    def _share_of(self, under_way: UnderWay, held: int, now_s: float) -> tuple[int, float]:
        """The number of pending groups that this worker may take and, if 0, after how many seconds to ask again."""
        share = self._fleet.share
        if groups := allowance(under_way, held, share, 0.0):
            self._denied_since_s = None
            return groups, 0.0
        if self._denied_since_s is None:
            self._denied_since_s = now_s
        waited_s = now_s - self._denied_since_s
        groups = allowance(under_way, held, share, waited_s, self._fleet.gain)
        return groups, denied_for_s(under_way, held, share, waited_s)

    async def take(self, tickets: Sequence[Ticket]) -> Taken:
        """Lease groups for all tickets in one call and start them."""
        asked = sum(ticket.groups for ticket in tickets)
        if asked > self._allowed or not self._is_fresh:  # a large ticket, or a ticket that arrived late
            await self._allow()
        wanted, held = await self._lease_and_start(min(asked, self._allowed))
        rest = iter(held)
        orders = [TicketGroups(list(islice(rest, ticket.groups))) for ticket in tickets]
        # tickets without pending groups are surplus: if put back, they would circulate among the workers
        return Taken(orders, unused=asked - wanted if self._pending and len(held) == wanted else 0)

    async def _lease_and_start(self, most: int) -> tuple[int, list[HeldLease]]:
        """Lease up to `most` groups and start them. Returns how many groups were requested, and the running groups."""
        if not most:
            return 0, []
        async with self.taking:
            asked_s, wanted, leases = await self._lease(most)
            given_up = await self._lender.beforehand(leases)
            if self.stopped and leases:
                await self._runner.hand_back(leases)
                leases = ()
            return wanted, [self.start(lease, asked_s, rest) for lease, rest in zip(leases, given_up, strict=False)]

    def stop(self) -> None:
        """Stop leasing."""
        self.stopped = self._fleet.draining = True
        self._signals.state.set()
        self._signals.room.set()

    @property
    def may_borrow(self) -> bool:
        """Whether this worker may make other workers' samples now."""
        return self.may_take() and not self._draining

    def may_take(self) -> bool:
        """Whether this worker may make more samples now."""
        if self.stopped or not self._host.ready or not self._places.with_room(self._control.open_tasks)[0]:
            return False
        if self._draining:
            return len(self._table) == 0
        return not any(held.lease.alone for held in self._table)

    async def _lease(self, asked: int) -> tuple[float, int, Sequence[Lease]]:
        """Lease up to `asked` groups, waiting while draining or while weights are too old; no leases after `stop`.

        Returns the time of the call, the number of groups requested, and the leases.
        """
        while not self.stopped:
            version = self._host.version
            if version is None or not self.may_take():
                await self._signals.room.wait()
                continue
            tasks, free = self._places.with_room(self._control.open_tasks)
            wanted = min(asked, free)
            if not wanted:
                break
            asked_s = monotonic()
            try:
                with self._table.expecting():
                    leased = await self._calls(
                        self._calls.buffer.lease,
                        tasks,
                        wanted,
                        worker=self._worker,
                        version=version.version,
                        epoch=version.epoch,
                        suspects_held=sum(held.lease.suspect for held in self._table),
                        idle=len(self._table) == 0,
                    )
            except StaleWorker as error:
                self._stale_versions.warning(version, "waiting for newer weights: %s", error)
                await self._signals.room.wait()
                continue
            self._draining = leased.drain
            if leased.leases or not leased.drain:
                return asked_s, wanted, leased.leases
        return 0.0, 0, ()

    def start(self, lease: Lease, asked_s: float, given_up: Collection[int] = ()) -> HeldLease:
        """Make the samples of a lease or a loan requested at `asked_s` (monotonic), except the `given_up` samples,
        which are for other workers. The caller holds the lock `taking`."""
        held = self._table.add(lease, asked_s)
        held.given_up.update(given_up)
        held.trace = self._traces.begin(lease, asked_s)
        indices = lease.borrowed or range(len(lease.samples))
        self._places.of(lease.task).enter(held, sum(lease.samples[index].status in UNFINISHED for index in indices))
        held.task = asyncio.create_task(self._runner.run(held))
        held.task.add_done_callback(partial(self._ended, held))
        return held

    def _ended(self, held: HeldLease, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            task.exception()  # of the run, such as `StoreLost`: the worker's other calls raise it too
        self._places.of(held.lease.task).leave(held)
        self._table.remove(held)
        if self._table.idle and not self._control.open_tasks:
            self._signals.control.set()  # a pause may wait for the last group, as sleep does
