"""Makes samples of other workers' groups, while this worker has places for them."""

import asyncio
from time import monotonic

from rollq.buffer.rollouts import Lease
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.groups.fleet_share import FleetShare
from rollq.workers.groups.intake import Intake
from rollq.workers.groups.leases import LeaseTable
from rollq.workers.groups.places import AllPlaces
from rollq.workers.groups.spread import borrowed_share, part_of
from rollq.workers.groups.task_control import TaskControl
from rollq.workers.signals import Signals

POLL_S = 10.0
"""How often it looks without a wake-up."""


class Borrower:
    """Borrows samples whenever some are offered."""

    def __init__(
        self,
        calls: BufferCalls,
        host: EngineHost,
        table: LeaseTable,
        control: TaskControl,
        intake: Intake,
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
        self._places = places
        self._fleet = fleet
        self._signals = signals
        self._worker = worker
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Borrow until cancelled; then what is unfinished is given back with its tokens. Raises `StoreLost`."""
        try:
            while True:
                if await self._borrow():
                    self._signals.offers.set()  # there may be more
                await self._signals.offers.wait(POLL_S)
                for task in [task for task in self._running if task.done()]:
                    self._running.discard(task)
                    task.result()
        finally:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)

    async def _borrow(self) -> bool:
        """Borrow samples that are offered, and make them; returns whether there were any."""
        found = False
        for task in self._control.open_tasks:
            if self._fleet.fleet.workers < 2 or not self._intake.may_take():
                continue
            under_way = await self._calls(self._calls.buffer.under_way, [task])
            version, places = self._host.version, self._places.of(task)
            part = part_of(under_way, self._fleet.share, self._places.group_size(task))
            most = min(places.free, part - places.open)
            if version is None or most <= 0:
                continue
            asked_s = monotonic()
            with self._table.expecting():
                loans = await self._calls(
                    self._calls.buffer.borrow,
                    [task],
                    most,
                    worker=self._worker,
                    version=version.version,
                    epoch=version.epoch,
                    share=borrowed_share(self._fleet.fleet, self._fleet.share),
                )
                self._running.update(self._started(loan, asked_s) for loan in loans)
            found = found or bool(loans)
        return found

    def _started(self, loan: Lease, asked_s: float) -> "asyncio.Task[None]":
        task = self._intake.start(loan, asked_s).task
        assert task is not None
        task.add_done_callback(lambda _: self._signals.offers.set())
        return task
