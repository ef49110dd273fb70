"""Controls which tasks may be leased, when their groups must end, and when the engine sleeps.

Invariant: no group of a paused task is started. Its running groups finish (`drain`), or end with their tokens so far
(`abort`, or when they take too long). The engine sleeps only when no lease is held or on its way.
"""

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from enum import StrEnum
from time import monotonic

from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.values.rollouts import Lease
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import EngineDead
from rollq.workers.groups.leases import LeaseTable, StopReason
from rollq.workers.settings import PauseMode, WorkerSettings
from rollq.workers.wake_signals import Signals
from rollq.workers.weight_follower import WeightFollower

log = logging.getLogger(__name__)

LEASABLE = (Control.RUN, Control.DONE)


class WorkerState(StrEnum):
    """A worker's state, for monitors and the trainer."""

    SERVING = "serving"
    DRAINING = "draining"  # no task may be leased, and groups are still in flight
    PAUSED = "paused"  # no task may be leased, and nothing is in flight
    ASLEEP = "asleep"  # paused, and the accelerator's memory is free


def leasable(controls: Mapping[str, Control]) -> tuple[str, ...]:
    """The tasks that may be leased."""
    return tuple(task for task, control in controls.items() if control in LEASABLE)


def wants_sleep(controls: Mapping[str, Control]) -> bool:
    """Whether the engine should free its memory: no task needs the engine, and at least one task asks it to sleep."""
    return not leasable(controls) and Control.SLEEP in controls.values()


def should_interrupt(lease: Lease, paused_s: float, mode: PauseMode, longest_s: float) -> bool:
    """Whether to interrupt a group whose task has been paused for `paused_s`.

    An evaluation's groups, and groups that must finish, are drained even when others are aborted.
    """
    return paused_s >= longest_s or (mode is PauseMode.ABORT and not (lease.must_finish or lease.evaluation))


class TaskControl:
    """Applies the controls of a worker's tasks."""

    def __init__(
        self,
        calls: BufferCalls,
        host: EngineHost,
        table: LeaseTable,
        follower: WeightFollower,
        signals: Signals,
        *,
        tasks: tuple[str, ...],
        settings: WorkerSettings,
    ) -> None:
        self.open_tasks: tuple[str, ...] = ()
        self.paused = False
        """Whether the operator has paused this worker."""
        self._calls = calls
        self._host = host
        self._table = table
        self._follower = follower
        self._signals = signals
        self._tasks = tasks
        self._settings = settings
        self._paused_since_s: dict[str, float] = {}
        self._sleep_wanted = ""

    @property
    def asleep_for(self) -> str:
        """The trainer's reason for the engine's sleep; '' unless the engine sleeps and should sleep."""
        return self._sleep_wanted if self._host.asleep else ""

    @property
    def state(self) -> WorkerState:
        if self._host.asleep:
            return WorkerState.ASLEEP
        if self.open_tasks:
            return WorkerState.SERVING
        return WorkerState.PAUSED if self._table.idle else WorkerState.DRAINING

    async def run(self) -> None:
        """Apply the controls until cancelled. Raises `StoreLost`, and `ConfigError` if the engine cannot sleep."""
        while True:
            replies = await self._calls.poll(self._calls.buffer.controls, self._tasks)
            controls = {task: control for task, (control, _) in replies.items()}
            sleep = next((reason for control, reason in replies.values() if control is Control.SLEEP), "")
            with suppress(EngineDead):  # the host reports it and starts a new engine for the next round
                await self._apply(controls, sleep, monotonic())
            await self._signals.control.wait()

    async def _apply(self, controls: Mapping[str, Control], sleep: str, now_s: float) -> None:
        self._want_sleep(sleep if wants_sleep(controls) else "")
        wanted = () if self.paused else leasable(controls)
        self._note_paused(wanted, now_s)
        self._open(tuple(task for task in wanted if task in self.open_tasks or not self._host.asleep))
        self._interrupt(now_s)
        if self._sleep_wanted:
            await self._sleep()
        elif wanted and self._host.asleep:
            await self._host.wake()
            await self._follower.catch_up()
            log.info("the engine is awake")
            self._open(wanted)

    def _note_paused(self, wanted: Collection[str], now_s: float) -> None:
        """Remember when the other tasks were paused."""
        paused = [task for task in self._tasks if task not in wanted]
        self._paused_since_s = {task: self._paused_since_s.get(task, now_s) for task in paused}

    def _open(self, tasks: tuple[str, ...]) -> None:
        if tasks != self.open_tasks:
            closed = [task for task in self._tasks if task not in tasks]
            log.info("no new groups of %s", ", ".join(closed)) if closed else log.info("all tasks continue")
            self.open_tasks = tasks
            self._state_changed()

    def _interrupt(self, now_s: float) -> None:
        for held in self._table:
            since_s = self._paused_since_s.get(held.lease.task)
            if since_s is None:
                continue
            if should_interrupt(held.lease, now_s - since_s, self._settings.pause, self._settings.pause_timeout_s):
                self._table.stop(held, StopReason.PAUSED)

    def _want_sleep(self, why: str) -> None:
        if why != self._sleep_wanted:
            self._sleep_wanted = why
            self._state_changed()

    async def _sleep(self) -> None:
        if self._host.version is None or self._host.asleep or not self._table.idle:
            return
        await self._host.sleep()
        log.info("the engine sleeps")
        self._state_changed()

    def _state_changed(self) -> None:
        self._signals.room.set()
        self._signals.state.set()
