"""One worker process from its settings to its end: engine, weights, leases, tickets and reports, wired together.

Invariant: whichever part fails for good (the run is gone, the engine died once too often) ends all parts, groups in
hand are given back where the server still takes them, and the reason is raised.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from rq import Queue

from rollq.buffer.errors import ConfigError, RollqError
from rollq.buffer.plugins import check_methods, load_plugin
from rollq.buffer.roles import WorkerBuffer
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import Engine, Tokenizer
from rollq.workers.engines.registry import make_engine
from rollq.workers.groups.intake import Intake
from rollq.workers.groups.leases import LeaseTable
from rollq.workers.groups.recipes import make_recipes
from rollq.workers.groups.runner import GroupRunner
from rollq.workers.groups.samples import SampleMaker
from rollq.workers.groups.task_control import TaskControl
from rollq.workers.groups.timeouts import AttemptTimeouts
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.rq.worker import RqWorker, incarnation_name
from rollq.workers.settings import WorkerSettings
from rollq.workers.task_settings import WorkerTask
from rollq.workers.tokenizers.byte import ByteTokenizer
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from rollq.workers.wakeups import Wakeups
from rollq.workers.weight_follower import WeightFollower

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.001
"""A thread that comes back from Redis may wait so long for a busy event loop; Python's 5 ms are felt in every call."""
REPORT_S = 1.0
LAST_WORDS_S = 1.0
ENGINE_METHODS = ("start", "generate", "swap", "abort", "sleep", "wake", "close")


def run_worker(
    buffer: WorkerBuffer, queue: Queue, tasks: Mapping[str, WorkerTask], settings: WorkerSettings, *, seed: int = 0
) -> None:
    """Serve `tasks` of the buffer's run until SIGTERM, SIGINT or RQ's shutdown command. Call it in the main thread.

    `buffer` and `queue` are the caller's to close. An outage of either server is waited out, however long.
    Raises `ConfigError`, `StoreLost`, `RunMismatch`, `ServerError` at the start, and `EngineDead` when the engine died
    more often than `settings.engine_restarts`.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    buffer.wait_out_outages()
    asyncio.run(Worker(buffer, queue, tasks, settings, seed, freeze=True).run())


class Worker:
    """The parts of one worker. Must be made where an event loop may later run it once."""

    def __init__(
        self,
        buffer: WorkerBuffer,
        queue: Queue,
        tasks: Mapping[str, WorkerTask],
        settings: WorkerSettings,
        seed: int,
        *,
        freeze: bool = False,
    ) -> None:
        """`freeze`: see `EngineHost`."""
        name = incarnation_name(settings.name)
        self._engine_name = settings.engine
        self.calls = BufferCalls(buffer)
        self.host = EngineHost(partial(load_engine, settings), settings.engine_restarts, freeze=freeze)
        self.wakeups = Wakeups(self.calls)
        self.following = WeightFollower(
            self.calls,
            self.host,
            self.wakeups.listener(),
            settings.swap,
            settings.weights_folder,
            settings.verify,
            name,
        )
        timeouts = AttemptTimeouts(settings.attempt_timeout_s, settings.dynamic_timeout)
        lease_s = {task: rules.lease_s for task, rules in tasks.items()}
        self.table = LeaseTable(self.calls, lease_s, timeouts)
        self.making = SampleMaker(self.host, make_tokenizer(settings), worker=name)
        self.processes = JudgePool(settings.judge_processes)
        self.recipes = make_recipes(tasks, settings, seed, self.processes)
        self.generation = GroupRunner(self.calls, self.host, self.recipes, self.making, timeouts)
        self.pausing = TaskControl(
            self.calls, self.host, self.table, self.following, self.wakeups.listener(), tuple(tasks), settings
        )
        self.intake = Intake(
            self.calls,
            self.generation,
            self.table,
            self.host,
            self.pausing,
            worker=name,
            capacity=settings.groups_in_flight,
        )
        self._report_soon = asyncio.Event()
        self.making.generated = self.intake.note_generated
        self.following.changed = self.intake.look_soon
        self.pausing.changed = (self.intake.look_soon, self._report_soon.set)
        self.rq = RqWorker(queue, buffer.run, self.intake, name=name, grace_s=settings.grace_s)

    async def run(self) -> None:
        """Work until told to stop. Raises what ended it for good."""
        self.rq.install_signals()
        with self.following:
            try:
                await self.host.start()
                await self._serve()
            finally:
                await self._end()

    async def _serve(self) -> None:
        background = [
            asyncio.create_task(part)
            for part in (
                self.wakeups.run(),
                self.following.run(),
                self.pausing.run(),
                self.table.run(),
                self.host.keep_alive(),
                self._report(),
            )
        ]
        serving = asyncio.create_task(self.rq.run())
        await asyncio.wait([serving, *background], return_when=asyncio.FIRST_COMPLETED)
        for part in background:
            if part.done() and (error := part.exception()) is not None:
                self.rq.give_up(error)
        try:
            await serving
        finally:
            for part in background:
                part.cancel()
            await asyncio.wait(background)

    async def _end(self) -> None:
        """Give back what is still held, sign off, stop the engine."""
        rest = [held.lease for held in self.table]
        with suppress(RollqError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                if rest:
                    await self.calls(self.calls.buffer.hand_back, rest)
                await self.calls(self.calls.buffer.forget_worker, self.rq.name)
        for recipe in self.recipes.values():
            await recipe.judge.close()
            for pool in recipe.pools.values():
                await pool.close()
        await self.processes.close()
        await self.host.close()
        self.calls.close()

    async def _report(self) -> None:
        """Tell monitors what this worker does: every second, and at once when it falls asleep or goes on."""
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "engine": self._engine_name}
        tokens, at_s = 0, monotonic()
        while True:
            self._report_soon.clear()
            made = self.making.tokens
            totals, version, now_s = self.generation.totals, self.host.version, monotonic()
            report: dict[str, Any] = facts | {
                "version": -1 if version is None else version.version,
                "epoch": -1 if version is None else version.epoch,
                "state": self.pausing.state.value,
                "asleep_for": self.pausing.asleep_for,
                "transfer_ranks": self.host.transfer_ranks,
                "in_flight": len(self.table),
                "tokens_per_s": round((made - tokens) / max(now_s - at_s, 1e-3), 1),
                "groups": totals.groups,
                "samples": totals.samples,
                "failed_samples": totals.failed_samples,
                "tokens": made,
                "recomputed_tokens": self.making.recomputed_tokens,
                "swaps": self.following.swaps,
                "swap_pause_s": round(self.following.swap_pause_s, 3),
                "restarted": totals.restarted,
                "refused": totals.refused,
            }
            tokens, at_s = made, now_s
            await self.calls(self.calls.buffer.report_worker, self.rq.name, report)
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await self._report_soon.wait()


def load_engine(settings: WorkerSettings) -> Engine:
    """A new engine: a built-in one, or one's own class by dotted path, made with `settings.options`.

    Raises `ConfigError` when there is none such, or it does not take the options.
    """
    if "." not in settings.engine:
        return make_engine(settings.engine, settings.options)
    make: Callable[..., Engine] = load_plugin("engine", settings.engine, {})
    try:
        engine = make(**settings.options)
        check_methods("engine", settings.engine, engine, *ENGINE_METHODS)
        return engine
    except TypeError as error:
        raise ConfigError(f"[worker.options] of engine {settings.engine!r}: {error}") from error


def make_tokenizer(settings: WorkerSettings) -> Tokenizer:
    """The tokenizer of the settings, else that of the engine's model, else bytes.

    Raises `ConfigError` when there is none for an engine whose model is elsewhere.
    """
    folder = settings.tokenizer or settings.options.get("model")
    if folder is None and settings.engine == "openai":
        raise ConfigError("[worker] tokenizer: engine 'openai' needs the folder of the served model's tokenizer")
    return ByteTokenizer() if folder is None else HfTokenizer(Path(folder))
