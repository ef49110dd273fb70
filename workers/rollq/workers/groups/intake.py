"""Leases for tickets: how many groups a worker takes, and when.

Invariant: groups are leased only while there is room, the engine serves published weights, and a task is open. A group
on its last try, because workers died while running it, has the engine to itself. A group that only has to be judged
and put frees its place at the engine; fewer groups are taken once slow judges hold over a quarter of the capacity.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from time import monotonic

from rollq.buffer.errors import StaleWorker
from rollq.buffer.log_once import LogOnce
from rollq.buffer.rollouts import Lease
from rollq.buffer.tickets import Ticket
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.groups.leases import HeldLease, LeaseTable
from rollq.workers.groups.runner import GroupRunner
from rollq.workers.groups.task_control import TaskControl
from rollq.workers.signals import Signals

log = logging.getLogger(__name__)

JUDGED_SHARE = 4
"""For every four groups of capacity, one more may be waiting for its judge. Any more would only grow stale."""


class TicketGroups:
    """The groups that were leased for one ticket, while they run."""

    def __init__(self, held: Sequence[HeldLease]) -> None:
        self.groups = [f"{entry.lease.task}/{entry.lease.group_id}" for entry in held]
        self._held = held
        self._tasks = [entry.task for entry in held if entry.task is not None]
        self._left = len(self._tasks)
        self._all_ended = asyncio.Event()
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def run(self) -> None:
        """Wait for the groups. When cancelled, stop those that are not finished."""
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
        signals: Signals,
        worker: str,
        capacity: int,
    ) -> None:
        self._calls = calls
        self._runner = runner
        self._table = table
        self._host = host
        self._control = control
        self._signals = signals
        self._worker = worker
        self._capacity = capacity
        self._draining = False
        self.stopped = False
        self._stale_versions = LogOnce(log)

    async def room(self, groups: int) -> int:
        """Wait until `groups` groups, at most the capacity, may be taken; return how many may, or 0 after `stop`."""
        while not self.stopped:
            free = self._free()
            if free >= min(groups, self._capacity) and self._may_take():
                return free
            await self._signals.room.wait()
        return 0

    async def take(self, tickets: Sequence[Ticket]) -> Sequence[TicketGroups]:
        """Lease groups for all tickets in one call and start them."""
        wanted = min(sum(ticket.groups for ticket in tickets), self._free())
        asked_s, leases = await self._lease(wanted)
        if self.stopped and leases:
            await self._runner.hand_back(leases)
            leases = ()
        orders, at = [], 0
        for ticket in tickets:
            share = leases[at : at + ticket.groups]
            at += len(share)
            orders.append(TicketGroups([self._start(lease, asked_s) for lease in share]))
        return orders

    def stop(self) -> None:
        """Lease nothing from now on."""
        self.stopped = True
        self._signals.room.set()

    def _may_take(self) -> bool:
        if not self._host.ready or not self._control.open_tasks:
            return False
        if self._draining:
            return len(self._table) == 0
        return self._free() > 0 and not any(held.lease.alone for held in self._table)

    def _free(self) -> int:
        """How many groups there is room for."""
        most = self._capacity + -(-self._capacity // JUDGED_SHARE)
        return min(self._capacity - self._table.generating, most - len(self._table))

    async def _lease(self, wanted: int) -> tuple[float, Sequence[Lease]]:
        """Lease up to `wanted` groups, waiting while draining or while weights are too old; no leases after `stop`."""
        while not self.stopped:
            version = self._host.version
            if version is None or not self._may_take():
                await self._signals.room.wait()
                continue
            asked_s = monotonic()
            try:
                with self._table.expecting():
                    leased = await self._calls(
                        self._calls.buffer.lease,
                        self._control.open_tasks,
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
                return asked_s, leased.leases
        return 0.0, ()

    def _start(self, lease: Lease, asked_s: float) -> HeldLease:
        held = self._table.add(lease, asked_s)
        held.task = asyncio.create_task(self._runner.run(held))
        held.task.add_done_callback(partial(self._ended, held))
        return held

    def _ended(self, held: HeldLease, task: "asyncio.Task[None]") -> None:
        self._table.remove(held)
        if self._table.idle and not self._control.open_tasks:
            self._signals.control.set()  # a pause that waits for the last group, as sleep does, need not wait longer
