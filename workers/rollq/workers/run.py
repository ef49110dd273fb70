"""Wires together one worker process: its engine, weights, leases, tickets and reports.

Invariant: when a part fails for good (the run is gone, the engine died too often), all parts end, held groups are
handed back if the server accepts them, and `run` raises the error.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from rq import Queue

from rollq.buffer.calls.orders import Order
from rollq.buffer.common.ending import cancel
from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.common.user_functions import ENGINE, check_object, inside
from rollq.buffer.errors import ConfigError, RollqError
from rollq.buffer.roles import WorkerBuffer
from rollq.buffer.tracing.tracer import start_tracer
from rollq.buffer.values.places import Place
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import Engine, Tokenizer
from rollq.workers.engines.registry import make_engine
from rollq.workers.gateway.open_sessions import Gateway
from rollq.workers.groups.agent_loops import check_loop
from rollq.workers.groups.attempt_traces import AttemptTraces
from rollq.workers.groups.borrower import Borrower
from rollq.workers.groups.cut_off import CutOff
from rollq.workers.groups.fleet_share import FleetShare
from rollq.workers.groups.group_judging import GroupJudging
from rollq.workers.groups.group_runner import GroupRunner
from rollq.workers.groups.intake import Intake
from rollq.workers.groups.leases import LeaseTable
from rollq.workers.groups.lender import Lender
from rollq.workers.groups.loans import Loans
from rollq.workers.groups.places import AllPlaces, Places
from rollq.workers.groups.rates import LastMinute
from rollq.workers.groups.recipes import Recipe, check_templates, make_recipes
from rollq.workers.groups.salvage import Salvage
from rollq.workers.groups.sample_judging import SampleJudging
from rollq.workers.groups.sample_maker import SampleMaker
from rollq.workers.groups.task_control import TaskControl
from rollq.workers.groups.task_settings import WorkerTask
from rollq.workers.groups.timeouts import AttemptTimeouts
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.rq.worker import RqWorker, incarnation_name, short_host
from rollq.workers.settings import WorkerSettings
from rollq.workers.tokenizers.byte import ByteTokenizer
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from rollq.workers.user_code.loop_watch import LoopWatch
from rollq.workers.wake_signals import Signals
from rollq.workers.wakeups import Wakeups
from rollq.workers.weight_follower import WeightFollower

if TYPE_CHECKING:
    from rollq.workers.gateway.http_server import Server

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.001
"""The longest wait, in seconds, of a thread that returns from Redis to a busy event loop. Python's default, 5 ms, slows
every call."""
LAST_WORDS_S = 1.0
"""An ending worker tries to reach the server for this many seconds."""


def run_worker(
    buffer: WorkerBuffer, queue: Queue, tasks: Mapping[str, WorkerTask], settings: WorkerSettings, *, seed: int = 0
) -> None:
    """Serve `tasks` of the buffer's run until SIGTERM, SIGINT or RQ's shutdown command. Call this in the main thread.

    The caller closes `buffer` and `queue`. The worker waits out outages of either server, however long. Raises
    `ConfigError`, `StoreLost`, `RunMismatch` or `ServerError`, at the start or later, and `EngineDead` if the engine
    dies more than `settings.engine_restarts` times.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    buffer.wait_out_outages()
    asyncio.run(Worker(buffer, queue, tasks, settings, seed, freeze=True).run())


class Worker:
    """The parts of one worker, for a single run in an event loop."""

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
        """`freeze` is described in `EngineHost`."""
        name = incarnation_name(settings.name or short_host())
        self._engine_name = settings.engine
        self._draining = False
        signals = self._signals = Signals()
        self.calls = calls = BufferCalls(buffer)
        self.host = EngineHost(partial(load_engine, settings), settings.engine_restarts, freeze=freeze)
        self.follower = WeightFollower(calls, self.host, signals, settings, worker=name, tasks=tuple(tasks))
        timeouts = AttemptTimeouts(settings.attempt_timeout_s, settings.dynamic_timeout)
        lease_s = {task: rules.lease_s for task, rules in tasks.items()}
        self.table = LeaseTable(calls, lease_s, timeouts, signals)
        tokenizer = make_tokenizer(settings)
        self.processes = JudgePool(settings.judge_processes, settings.judge_environment)
        self.gateway = Gateway(settings.gateway)
        self.gateway_server: Server | None = None
        self.recipes = make_recipes(tasks, settings, seed, self.processes, self.gateway)
        check_templates(self.recipes, tokenizer)
        for recipe in self.recipes.values():
            check_loop(recipe.loop, tokenizer)
        self.places = make_places(self.recipes, self.host, signals, settings.samples_in_flight)
        self.loans = Loans(calls, signals)
        self.judging = SampleJudging()
        self.maker = SampleMaker(
            self.host, tokenizer, self.table, self.places, Salvage(calls), self.loans, self.judging, worker=name
        )
        self.runner = GroupRunner(calls, self.host, self.recipes, self.maker, GroupJudging(self.judging), timeouts)
        self.control = TaskControl(
            calls, self.host, self.table, self.follower, signals, tasks=tuple(tasks), settings=settings
        )
        self.fleet = FleetShare(calls, self.host, self.control, self.places, self.maker, worker=name)
        self.lender = Lender(
            calls, self.table, self.places, self.control, self.maker, self.loans, self.fleet, self.recipes
        )
        self.traces = AttemptTraces(start_tracer("worker", buffer.run, lambda: buffer.incarnation), name)
        self.cut_off = CutOff(self.table, self.recipes, signals)
        self.intake = Intake(
            calls, self.host, self.table, self.runner, self.control,
            places=self.places, fleet=self.fleet, lender=self.lender, signals=signals, traces=self.traces, worker=name,
        )  # fmt: skip
        self.borrower = Borrower(
            calls, self.host, self.table, self.control, self.intake, self.recipes,
            places=self.places, fleet=self.fleet, signals=signals, worker=name,
        )  # fmt: skip
        shared = buffer.is_on(queue.connection)
        self.rq = RqWorker(queue, buffer.run, self.intake, name=name, grace_s=settings.grace_s, listens=not shared)
        self.watch = LoopWatch(self._while_blocked)
        self._last_report: dict[str, Any] = {}
        self.wakeups = Wakeups(calls, signals, self.rq.command_channels if shared else None)

    async def run(self) -> None:
        """Work until asked to stop. Raises the error that ended the worker for good."""
        self.rq.install_signals(self.watch.interrupt)
        log.info("this worker is %s", self.rq.name)
        with self.follower:
            try:
                if await self._start_engine():
                    await self._serve()
            finally:
                await self._end()

    async def _start_engine(self) -> bool:
        """Start the engine. Returns False, without an engine, if the worker is asked to stop during the start."""
        starting = asyncio.create_task(self.host.start())
        parts = [starting, asyncio.create_task(self.rq.until_stop())]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(parts)
        if starting.cancelled():
            return False
        starting.result()
        return True

    async def _serve(self) -> None:
        if self.gateway.is_wanted:
            from rollq.workers.gateway.http_server import Server  # needs aiohttp

            self.gateway_server = Server(self.gateway)
            await self.gateway_server.start()
        background = [
            asyncio.create_task(part)
            for part in (
                self.watch.run(),
                self.wakeups.run(),
                self.follower.run(),
                self.control.run(),
                self.table.run(),
                self.loans.run(),
                self.borrower.run(),
                self.cut_off.run(),
                self.host.keep_alive(),
                self._report(),
            )
        ]
        for part in background:
            part.add_done_callback(self.rq.part_ended)
        ending = asyncio.create_task(self._end_waits())
        try:
            await self.rq.run()
        finally:
            await cancel([ending, *background])

    async def _end_waits(self) -> None:
        """End programs' waits for sessions once the worker stops or is drained."""
        await self.rq.until_stop()
        self.gateway.offers.end_waits()

    async def _end(self) -> None:
        """Hand back the remaining leases, sign off, and stop the engine."""
        leases = [held.lease for held in self.table if not held.lease.borrowed]
        with suppress(RollqError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                if leases:
                    await self.calls(self.calls.buffer.hand_back, leases)
                await self.fleet.leave()
                await self.calls(self.calls.buffer.forget_worker, self.rq.name)
        await self._close_recipes()
        await self.processes.close()
        if self.gateway_server is not None:
            await self.gateway_server.close()
        await self.host.close()
        self.calls.close()
        self.traces.close()

    async def _close_recipes(self) -> None:
        for recipe in {id(recipe): recipe for recipe in self.recipes.values()}.values():  # shards share a recipe
            await recipe.close()
            for pool in recipe.pools.values():
                await pool.close()

    async def _report(self) -> None:
        """Report this worker's state to monitors every second, and immediately when it changes."""
        facts = {"engine": self._engine_name, **({"gateway": self.gateway.url} if self.gateway.url else {})}
        last_minute = LastMinute(monotonic(), self.maker.times())
        idle_since_s = monotonic()
        while True:
            if self.places.taken:
                idle_since_s = monotonic()
            last_minute.note(monotonic(), self.maker.times())
            rates = {
                "tokens_per_s": round(last_minute.per_s("tokens"), 1),
                "generate_s": last_minute.ratio("generate_s", "generated"),
                "judge_s": last_minute.ratio("judge_s", "judged"),
                "unrewarded": last_minute.ratio("unrewarded", "judged"),
                "judge_error": self.judging.error,
                "idle_s": round(monotonic() - idle_since_s, 1),
            }
            report = self._last_report = asdict(Place.here()) | facts | rates | self._state() | self._totals()
            self._follow(await self.calls.poll(self.calls.buffer.report_worker, self.rq.name, report))
            await self.fleet.refresh()
            await self.lender.look()
            await self._signals.state.wait()

    def _while_blocked(self, place: str) -> None:
        """While a function blocks the event loop, renew the leases and report the function. Called in the watch's
        thread."""
        self.table.renew_in_thread()
        self.calls.buffer.report_worker(self.rq.name, self._last_report | {"blocked_by": place})

    def _follow(self, order: Order) -> None:
        """Carry out the operator's order."""
        if self.control.paused != (order is Order.PAUSE):
            self.control.paused = order is Order.PAUSE
            log.info("the operator %s worker %s", "paused" if self.control.paused else "resumed", self.rq.name)
            self._signals.control.set()
        if order is Order.DRAIN and not self._draining:
            self._draining = self.fleet.draining = True
            log.info("the operator drains worker %s: it stops once its groups have ended", self.rq.name)
            self.rq.request_shutdown()

    def _state(self) -> dict[str, Any]:
        version = self.host.version
        return {
            "version": -1 if version is None else version.version,
            "epoch": -1 if version is None else version.epoch,
            "state": self.control.state.value,
            "asleep_for": self.control.asleep_for,
            "transfer_ranks": self.host.transfer_ranks,
            "in_flight": len(self.table),
            "samples_in_flight": self.places.taken,
            "capacity": self.places.capacity,
            "shared_tokens_per_s": round(self.fleet.tokens_per_s, 1),
            "share": round(self.fleet.share, 3),
            "speed": self.maker.speed.described(self.places.capacity),
            "refused_weights": self.follower.refused,
            "judge_doubt": next((doubt for recipe in self.recipes.values() if (doubt := recipe.own_answers.doubt)), ""),
            "hanging_calls": sum(recipe.hanging_calls for recipe in self.recipes.values()),
        }

    def _totals(self) -> dict[str, Any]:
        totals = self.runner.totals
        return {
            "groups": totals.groups,
            "samples": totals.samples,
            "failed_samples": totals.failed_samples,
            "tokens": self.maker.tokens,
            "recomputed_tokens": self.maker.recomputed_tokens,
            "swaps": self.follower.swaps,
            "swap_pause_s": round(self.follower.swap_pause_s, 3),
            "restarted": totals.restarted,
            "refused": totals.refused,
            **({"refused_outcomes": self.gateway.refused_outcomes} if self.gateway.is_wanted else {}),
        }


def make_places(
    recipes: Mapping[str, Recipe], host: EngineHost, signals: Signals, samples_in_flight: int | None
) -> AllPlaces:
    """Make the places for samples: the engine's, and a separate kind for each agent loop that limits its sessions. Each
    kind has at most `samples_in_flight` places."""
    engine = Places(lambda: samples_in_flight or host.max_sequences, signals)
    by_recipe: dict[int, Places] = {}  # shards share a recipe
    sessions: dict[str, Places] = {}
    for task, recipe in recipes.items():
        if (most := recipe.sessions) is not None:
            capacity = min(most, samples_in_flight or most)
            sessions[task] = by_recipe.setdefault(id(recipe), Places(partial(int, capacity), signals))
    sizes = {task: recipe.settings.group_size for task, recipe in recipes.items()}
    return AllPlaces(engine, sessions, sizes)


def load_engine(settings: WorkerSettings) -> Engine:
    """Make the engine, a built-in one or a custom class by dotted path, with `settings.options`.

    Raises `ConfigError` for an unknown engine or unsupported options.
    """
    if "." not in settings.engine:
        return make_engine(settings.engine, settings.options)
    make: Callable[..., Engine] = load_plugin("engine", settings.engine, {})
    try:
        engine = make(**settings.options)
    except TypeError as error:
        raise ConfigError(f"[worker.options] of engine {settings.engine!r}: {error}") from error
    with inside("[worker]"):
        check_object(engine, ENGINE, settings.engine)
    return engine


def make_tokenizer(settings: WorkerSettings) -> Tokenizer:
    """Load the tokenizer that the settings name, or else the model's. Without either, return the byte tokenizer.

    Raises `ConfigError` if no tokenizer is named for engine `openai` or `sglang`, or a chat template is set for the
    byte tokenizer, and the errors of `HfTokenizer`.
    """
    folder = settings.tokenizer or settings.options.get("model")
    if folder is None and settings.engine in ("openai", "sglang"):
        raise ConfigError(
            f"[worker] tokenizer: engine {settings.engine!r} needs the folder of the served model's tokenizer"
        )
    if folder is None and settings.chat_template:
        raise ConfigError("[worker] chat_template: needs the folder of a tokenizer, named by [worker] tokenizer")
    return ByteTokenizer() if folder is None else HfTokenizer(Path(folder), settings.chat_template)
