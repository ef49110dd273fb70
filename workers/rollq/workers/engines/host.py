"""Keeps an engine alive, and tracks whether the engine serves weights that the trainer published.

Invariant: `published` is set exactly while a live engine serves weights that came through `swap` or `receive`. Groups
are leased only then, so a token never carries a version that its engine has not loaded.
"""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import VersionSpan
from rollq.buffer.weights.probe import Probe
from rollq.workers.engines.protocol import (
    SEQUENCES,
    BoundedEngine,
    Completion,
    Engine,
    EngineDead,
    ImageEngine,
    Request,
    RequestRefused,
    Scorer,
    SwapMode,
    WeightsVersion,
)
from rollq.workers.engines.receiver import Incoming, Receiver
from rollq.workers.engines.weights_check import SelfChecking, WeightsCheck, WeightsRejected, check_logprobs, confirm
from rollq.workers.engines.weights_trial import Trials
from rollq.workers.user_code.errors import what_happened

log = logging.getLogger(__name__)

T = TypeVar("T")

YOUNG_OBJECTS = 10_000
"""How many new objects start a collection of the youngest generation. With Python's default, 700, a busy worker spends
2 % of a core on collections."""


class EngineHost:
    """Keeps one engine, replaces it up to `restarts` times when it dies, and checks its weights after each swap."""

    def __init__(self, make: Callable[[], Engine], restarts: int, *, freeze: bool = False) -> None:
        """With `freeze`, the host calls `freeze_heap` whenever an engine has started. Otherwise, garbage collection
        scans all of vLLM's and torch's objects, and blocks the event loop for 0.7 s every 10 s."""
        self._make = make
        self._freeze = freeze
        self._restarts_left = restarts
        self._engine: Engine | None = None
        self._dead: Engine | None = None
        self._death = asyncio.Event()
        self._reason = "it has not been started"
        self.published = asyncio.Event()
        self.asleep = False
        self.check: WeightsCheck | None = None
        self._running: set[Request] = set()
        self._trials = Trials()
        self._changing = asyncio.Lock()

    @property
    def version(self) -> WeightsVersion | None:
        """The version that the engine serves; None while no engine lives."""
        return None if self._engine is None else self._engine.version

    @property
    def max_sequences(self) -> int:
        """The number of sequences that the engine can run at a time."""
        sequences = self._engine.max_sequences if isinstance(self._engine, BoundedEngine) else None
        return sequences or SEQUENCES

    @property
    def transfer_ranks(self) -> int:
        """The number of ranks that the engine adds to the trainer's process group. 0 means that the engine loads
        weights only from files."""
        return self._engine.transfer_ranks if isinstance(self._engine, Receiver) else 0

    async def start(self) -> None:
        """Make and start an engine. Raises the engine's error if it cannot start."""
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
            log.error("the engine died: %s; restarting it, %d restarts left", self._reason, self._restarts_left)
            self._death.clear()
            await self.start()

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`. Tokens without a version from the engine get the version at the request's start.

        Raises `SampleFailed` with the kind `context` or `provider`, and `EngineDead`.
        """
        engine = self._living()
        if request.images is not None:
            _check_takes_images(engine)
        started = engine.version
        self._running.add(request)
        try:
            completion = await self._ask(engine, engine.generate(request))
        except (EngineDead, SampleFailed):
            raise
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        except Exception as error:
            raise SampleFailed(FailureKind.PROVIDER, f"engine: {what_happened(error)}") from error
        finally:
            self._running.discard(request)
        if not completion.versions and len(completion.ids) > 0:
            span = VersionSpan(started.epoch, started.version, len(completion.ids))
            completion = replace(completion, versions=(span,))
        return await self._trials.sift(completion)

    def trusts(self, versions: Collection[VersionSpan]) -> bool:
        """Whether all these versions have passed their check; False while any check runs."""
        return self._trials.trusts(versions)

    @property
    def ready(self) -> bool:
        """Whether groups may be leased: a live engine serves published weights that have been checked."""
        version = self.version
        return version is not None and self.published.is_set() and not self._trials.holds(version)

    async def abort(self, requests: Collection[Request]) -> None:
        """See `Engine.abort`. Requests of a dead engine have already ended."""
        if self._engine is not None and requests:
            await self._ask(self._engine, self._engine.abort(requests))

    async def swap(
        self, weights: Path, version: WeightsVersion, mode: SwapMode, probe: Probe | None = None
    ) -> float | None:
        """See `Engine.swap`. While the engine sleeps, its weights are not on the device: returns None without a swap.

        Raises `WeightsRejected` if the engine's logprobs differ from `probe`'s or are not finite.
        """
        async with self._changing:
            if self.asleep:
                return None
            engine = self._living()
            return await self._change(engine, engine.swap(weights, version, mode), version, probe)

    async def receive(self, incoming: Incoming, version: WeightsVersion, mode: SwapMode) -> float | None:
        """See `Receiver.receive`. Returns None and raises `WeightsRejected` as `swap` does. Raises `ConfigError` for an
        engine that cannot receive weights."""
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
            taking = incoming.take(engine.receive(incoming, version, mode))
            return await self._change(engine, taking, version, incoming.probe)

    async def _change(
        self, engine: Engine, change: Awaitable[float], version: WeightsVersion, probe: Probe | None
    ) -> float:
        """Await a change of weights, then check the new weights. Their tokens are held back until the check has ended.
        If the check fails, all requests end."""
        passed = False
        self._trials.begin(version)  # before the load: the engine may use the weights immediately
        if isinstance(engine, SelfChecking):
            engine.expect(probe)
        try:
            swap_pause_s = await self._ask(engine, change)
            if isinstance(engine, SelfChecking):
                self.check = engine.check
            if isinstance(engine, Scorer):
                self.check = await self._ask(engine, check_logprobs(engine, version.version, probe))
                if self.check is not None:
                    await self._ask(engine, confirm(engine, version.version, probe, self.check))
            passed = True
        except WeightsRejected:
            self.published.clear()
            await self.abort(list(self._running))
            raise
        finally:
            self._trials.end(version, passed=passed)
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
        """Drop a dead engine. Every pending request calls this; only the first call has an effect.

        `keep_alive` closes the engine, because the request may be cancelled first.
        """
        if engine is self._engine:
            self._reason = str(error)
            self._engine, self._dead = None, engine
            self.published.clear()
            self.asleep = False
            self._death.set()


def _check_takes_images(engine: Engine) -> None:
    if not (isinstance(engine, ImageEngine) and engine.takes_images):
        raise RequestRefused("the engine takes no images: use 'vllm' or 'transformers' with a model that reads them")


def freeze_heap() -> None:
    """Exclude all of this process's existing objects from garbage collection, and collect new objects less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
