"""Makes samples of other workers' groups while this worker has free places."""

import asyncio
from collections.abc import Mapping
from time import monotonic

from rollq.buffer.values.rollouts import Lease
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.groups.fleet_share import FleetShare
from rollq.workers.groups.intake import Intake
from rollq.workers.groups.leases import HeldLease, LeaseTable
from rollq.workers.groups.places import AllPlaces
from rollq.workers.groups.recipes import Recipe
from rollq.workers.groups.spread import borrowed_share, part_of
from rollq.workers.groups.task_control import TaskControl
from rollq.workers.rq.in_flight import HAND_BACK_S
from rollq.workers.wake_signals import Signals

POLL_S = 10.0
"""The seconds between checks without a wake-up."""


class Borrower:
    """Borrows samples whenever some are offered."""

    def __init__(
        self,
        calls: BufferCalls,
        host: EngineHost,
        table: LeaseTable,
        control: TaskControl,
        intake: Intake,
        recipes: Mapping[str, Recipe],
        *,
        places: AllPlaces,
        fleet: FleetShare,
        signals: Signals,
        worker: str,
    ) -> None:
        self._calls = calls
        self._host = host
        self._table = table
        self._control = control
        self._intake = intake
        self._recipes = recipes
        self._places = places
        self._fleet = fleet
        self._signals = signals
        self._worker = worker
        self._running: dict[asyncio.Task[None], HeldLease] = {}

    async def run(self) -> None:
        """Borrow until cancelled. Then return unfinished samples with their tokens. Raises `StoreLost`."""
        try:
            while True:
                if await self._borrow():
                    self._signals.offers.set()  # there may be more
                await self._signals.offers.wait(POLL_S)
                for task in [task for task in self._running if task.done()]:
                    del self._running[task]
                    task.result()
        finally:
            await self._end()

    async def _end(self) -> None:
        unfinished = [task for task, held in self._running.items() if not held.finished]
        for task in unfinished:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=HAND_BACK_S)

    async def _borrow(self) -> bool:
        """Borrow offered samples and make them. Returns whether any were offered."""
        has_borrowed = False
        for task in self._control.open_tasks:
            settings = self._recipes[task].settings
            if settings.kind == "train" and settings.spread == "tail" and await self._is_wanted(task):
                async with self._intake.taking:
                    has_borrowed = await self._borrow_of(task) or has_borrowed
        return has_borrowed

    async def _is_wanted(self, task: str) -> bool:
        """Whether this worker can make samples of a task and some are offered."""
        has_others = self._fleet.fleet.workers > 1 and self._fleet.share > 0
        could = has_others and self._places.of(task).free > 0 and self._intake.may_borrow
        return could and await self._calls(self._calls.buffer.offered, task)

    async def _borrow_of(self, task: str) -> bool:
        under_way = await self._calls(self._calls.buffer.under_way, [task])
        version, places = self._host.version, self._places.of(task)
        part = part_of(under_way, self._fleet.share, self._places.group_size(task))
        most = min(places.free, part - places.open)
        if version is None or most <= 0 or not self._intake.may_borrow:
            return False
        asked_s = monotonic()
        with self._table.expecting():
            loans = await self._calls(
                self._calls.buffer.borrow,
                task,
                most,
                worker=self._worker,
                version=version.version,
                epoch=version.epoch,
                share=borrowed_share(self._fleet.fleet, self._fleet.share),
            )
            for loan in loans:
                self._start(loan, asked_s)
        return bool(loans)

    def _start(self, loan: Lease, asked_s: float) -> None:
        held = self._intake.start(loan, asked_s)
        assert held.task is not None
        self._running[held.task] = held
        held.task.add_done_callback(lambda _: self._signals.offers.set())
