"""Keeps an engine alive, and knows whether it serves weights that the trainer published.

Invariant: `published` is set exactly while a live engine serves weights that came through `swap` or `receive`. Groups
are leased only then, so that no token claims a version that its engine never loaded.
"""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rollq.buffer.errors import ConfigError
from rollq.buffer.rollouts import VersionSpan
from rollq.workers.engines.protocol import Completion, Engine, EngineDead, Request, SwapMode, WeightsVersion
from rollq.workers.engines.receiver import Incoming, Receiver

log = logging.getLogger(__name__)

T = TypeVar("T")

YOUNG_OBJECTS = 10_000
"""Objects made between two collections of young ones; at Python's 700 they take 0.02 of a core in a busy worker."""


class EngineHost:
    """One engine at a time, made anew when it dies, up to `restarts` times."""

    def __init__(self, make: Callable[[], Engine], restarts: int, *, freeze: bool = False) -> None:
        """`freeze`: call `freeze_heap` whenever an engine has started. Otherwise garbage collection scans all objects
        of vLLM and torch, which blocks the event loop for 0.7 s every 10 s."""
        self._make = make
        self._freeze = freeze
        self._restarts_left = restarts
        self._engine: Engine | None = None
        self._dead: Engine | None = None
        self._death = asyncio.Event()
        self._reason = "it has not been started"
        self.published = asyncio.Event()
        self.asleep = False
        self._changing = asyncio.Lock()

    @property
    def version(self) -> WeightsVersion | None:
        """The weights that serve now; None while no engine lives."""
        return None if self._engine is None else self._engine.version

    @property
    def transfer_ranks(self) -> int:
        """Ranks that the living engine brings into a group with the trainer; 0: it takes weights from files only."""
        return self._engine.transfer_ranks if isinstance(self._engine, Receiver) else 0

    async def start(self) -> None:
        """Make and start an engine. Raises what the engine raises when it cannot start."""
        if self._freeze:
            gc.unfreeze()  # a dead engine may be collected
        engine = self._make()
        await engine.start()
        self._engine = engine
        if self._freeze:
            freeze_heap()

    async def keep_alive(self) -> None:
        """Restart the engine whenever it dies. Raises `EngineDead` when it has died too often."""
        while True:
            await self._death.wait()
            await self._close_dead()
            if self._restarts_left == 0:
                raise EngineDead(f"the engine died too often: {self._reason}")
            self._restarts_left -= 1
            log.error("the engine died: %s; starting it again, %d restarts left", self._reason, self._restarts_left)
            self._death.clear()
            await self.start()

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`. Tokens whose version the engine does not report get the one at the request's start."""
        engine = self._living()
        started = engine.version
        completion = await self._ask(engine, engine.generate(request))
        if completion.versions or len(completion.ids) == 0:
            return completion
        return replace(completion, versions=(VersionSpan(started.epoch, started.version, len(completion.ids)),))

    async def abort(self, requests: Collection[Request]) -> None:
        """See `Engine.abort`. Requests of a dead engine have already ended."""
        if self._engine is not None and requests:
            await self._ask(self._engine, self._engine.abort(requests))

    async def swap(self, weights: Path, version: WeightsVersion, mode: SwapMode) -> float | None:
        """See `Engine.swap`. None, and nothing done, while the engine sleeps: its weights are not on the device."""
        async with self._changing:
            if self.asleep:
                return None
            engine = self._living()
            swap_pause_s = await self._ask(engine, engine.swap(weights, version, mode))
        if engine is self._engine:
            self.published.set()
        return swap_pause_s

    async def receive(self, incoming: Incoming, version: WeightsVersion, mode: SwapMode) -> float | None:
        """See `Receiver.receive`; None as in `swap`. Raises `ConfigError` for an engine that cannot."""
        async with self._changing:
            if self.asleep:
                return None
            engine = self._living()
            if not isinstance(engine, Receiver) or not engine.transfer_ranks:
                raise ConfigError(
                    "the trainer sends weights by transport 'nccl', which this worker's engine does not take: set "
                    "[worker] engine = 'vllm' with options.engine_args.weight_transfer_config = { backend = 'nccl' }, "
                    "or [trainer] transport = 'path'"
                )
            swap_pause_s = await self._ask(engine, incoming.take(engine.receive(incoming, version, mode)))
        if engine is self._engine:
            self.published.set()
        return swap_pause_s

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        async with self._changing:
            engine = self._living()
            await self._ask(engine, engine.sleep())
            self.asleep = engine is self._engine

    async def wake(self) -> None:
        """See `Engine.wake`."""
        async with self._changing:
            engine = self._living()
            await self._ask(engine, engine.wake())
            self.asleep = False

    async def close(self) -> None:
        """Stop the engine."""
        engine, self._engine = self._engine, None
        self.published.clear()
        self.asleep = False
        await self._close_dead()
        if engine is not None:
            await engine.close()

    async def _close_dead(self) -> None:
        engine, self._dead = self._dead, None
        if engine is not None:
            await engine.close()

    def _living(self) -> Engine:
        if self._engine is None:
            raise EngineDead(f"the engine is not running: {self._reason}")
        return self._engine

    async def _ask(self, engine: Engine, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except EngineDead as error:
            self._bury(engine, error)
            raise

    def _bury(self, engine: Engine, error: EngineDead) -> None:
        """Drop a dead engine. Every pending request ends up here; only the first has an effect.

        `keep_alive` closes the engine, not the request, which may be cancelled meanwhile.
        """
        if engine is self._engine:
            self._reason = str(error)
            self._engine, self._dead = None, engine
            self.published.clear()
            self.asleep = False
            self._death.set()


def freeze_heap() -> None:
    """Exclude all living objects from garbage collection, and collect young ones less often, for this whole process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
