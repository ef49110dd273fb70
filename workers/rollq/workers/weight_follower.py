"""Keeps the engine on the trainer's latest published weights.

Invariant: weights from files reach the engine only after the check that the setting `verify` selects; other weights
come from the trainer itself. If weights fail, the engine keeps or reloads the earlier version, and the error is logged
once. The weights are tried again, unless the engine rejected them or a broadcast did not fit.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from rollq.buffer.calls.replies.trainer import LiveModel
from rollq.buffer.errors import ConfigError, ServerError, WeightsError
from rollq.buffer.weights.broadcast_log import round_number
from rollq.buffer.weights.loading import load_weights
from rollq.buffer.weights.probe import Probe
from rollq.buffer.weights.store import read_probe
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import EngineDead, SwapMode, WeightsVersion
from rollq.workers.engines.receiver import BroadcastReceiver, TooLate
from rollq.workers.engines.weights_check import WeightsLate, WeightsRejected
from rollq.workers.settings import WorkerSettings
from rollq.workers.wake_signals import Signals

log = logging.getLogger(__name__)

RETRY_S = 2.0


class WeightFollower:
    """Loads published weights into the engine. Downloads go to a temporary folder, which is removed at the end."""

    def __init__(
        self,
        calls: BufferCalls,
        host: EngineHost,
        signals: Signals,
        settings: WorkerSettings,
        *,
        worker: str,
        tasks: Sequence[str] = (),
    ) -> None:
        """`tasks` names the tasks that the worker serves, including evaluations."""
        self.swaps = 0
        self.swap_pause_s = 0.0
        self._host = host
        self._calls = calls
        self._signals = signals
        self._settings = settings
        self._tasks = tasks
        self._broadcasts = BroadcastReceiver(calls, worker)
        self.refused: str | None = None
        self._refused: WeightsVersion | None = None
        self._rejected: WeightsVersion | None = None
        self._good: LiveModel | None = None
        self._catching_up = asyncio.Lock()

    def __enter__(self) -> "WeightFollower":
        parent = self._settings.weights_folder
        try:
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="rollq-weights-", dir=parent))
        except OSError as error:
            where = tempfile.gettempdir() if parent is None else parent
            raise ConfigError(f"[worker] weights_folder: no folder can be made in {str(where)!r}: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    async def run(self) -> None:
        """Follow until cancelled, except while the engine sleeps. Raises `StoreLost`, and `ConfigError` if the engine's
        settings do not allow the change of weights."""
        while True:
            if not self._host.asleep and not await self.catch_up():
                await asyncio.sleep(RETRY_S)
            await self._signals.weights.wait()

    async def catch_up(self) -> bool:
        """Load the live weights if the engine serves other weights. Returns False if the live weights were refused or
        delayed."""
        async with self._catching_up:
            live = await self._calls.poll(self._calls.buffer.live_model)
            if live is None or self._host.version is None:
                return True
            wanted = WeightsVersion(live.epoch, live.version, live.digest)
            if self._host.published.is_set() and (wanted == self._host.version or await self._may_stay(live)):
                return True
            return await self._serve(live, wanted)

    async def _may_stay(self, live: LiveModel) -> bool:
        """Whether the engine may keep its weights for now. After a rewind, they may be newer than the live weights, and
        the trainer may publish them again; a change to the older weights in between would make all samples staler.
        False for a broadcast, which waits for every engine, and for an evaluation, which waits for its weights."""
        served = self._host.version
        if served is None or not live.awaits(served.epoch, served.version, served.digest):
            return False
        if round_number(live.uri) is not None:
            return False
        others = partial(self._calls.buffer.evaluates_others, epoch=served.epoch, version=served.version)
        return not await self._calls.poll(others, self._tasks)

    async def _serve(self, live: LiveModel, wanted: WeightsVersion) -> bool:
        # a broadcast that did not fit will not fit the next time either
        is_unfit = wanted == self._refused and round_number(live.uri) is not None
        if wanted == self._rejected or is_unfit:
            await self._go_back()
            return False
        try:
            swap_pause_s = await self._swap(live, wanted, self._settings.swap)
        except WeightsLate as error:
            self._refuse(wanted, error)
            return False
        except WeightsRejected as error:
            self._rejected = wanted
            await self._go_back()
            self._refuse(wanted, error)
            return False
        except TooLate as error:
            log.info("weights of version %d are delayed: %s", wanted.version, error)
            return False
        except WeightsError as error:
            await self._go_back()
            self._refuse(wanted, error)
            return False
        except EngineDead as error:
            log.warning("the engine died while it loaded weights of version %d: %s", wanted.version, error)
            return True
        if swap_pause_s is not None:  # None: the engine fell asleep, and catches up when it wakes
            self._good = live
            self._note_swap(wanted, swap_pause_s)
        return True

    async def _go_back(self) -> None:
        """Go back to the weights before the refused ones, if the engine no longer serves published weights and the
        earlier files still exist."""
        good = self._good
        if self._host.published.is_set() or good is None or round_number(good.uri) is not None:
            return
        version = WeightsVersion(good.epoch, good.version, good.digest)
        mode = SwapMode.RESTART if self._settings.swap is SwapMode.RESTART else SwapMode.ABORT
        try:
            swap_pause_s = await self._swap(good, version, mode)
        except WeightsError as error:
            log.error("weights of version %d cannot be served again: %s", good.version, error)
            self._good = None
        except EngineDead as error:
            log.warning("the engine died while it loaded weights of version %d again: %s", good.version, error)
        else:
            if swap_pause_s is not None:  # None: the engine fell asleep, and goes back when it wakes
                self._signals.room.set()

    async def _swap(self, live: LiveModel, wanted: WeightsVersion, mode: SwapMode) -> float | None:
        """Swap to the weights of `live`, from files or from a broadcast; see `EngineHost.swap`."""
        number = round_number(live.uri)
        if number is None:
            folder, probe = await self._calls(self._load, live)
            return await self._host.swap(folder, wanted, mode, probe)
        incoming = await self._broadcasts.enter(live, number)
        return await self._host.receive(incoming, wanted, mode)

    def _refuse(self, wanted: WeightsVersion, error: WeightsError) -> None:
        """Log refused weights once."""
        if wanted != self._refused:
            state = "the engine serves the old ones" if self._host.published.is_set() else "there are no others"
            self.refused = f"weights of version {wanted.version} refused, {state}: {error}"
            log.error("%s", self.refused)
        self._refused = wanted

    def _note_swap(self, version: WeightsVersion, swap_pause_s: float) -> None:
        message = "serving weights of version %d (epoch %d); generation paused for %.3f s"
        log.info(message, version.version, version.epoch, swap_pause_s)
        self.swaps += 1
        self.swap_pause_s += swap_pause_s
        self._refused = self._rejected = self.refused = None
        self._signals.room.set()

    def _load(self, live: LiveModel) -> tuple[Path, Probe | None]:
        if not live.uri:  # nothing to load: only an engine that reads no weights accepts the empty folder
            return self._folder, None
        buffer = self._calls.buffer
        try:
            folder = load_weights(buffer, live.uri, live.digest, self._folder, self._settings.verify)
            return folder, read_probe(buffer, live.digest)
        except ServerError:
            raise
        except OSError as error:
            raise WeightsError(f"weights cannot be written to {str(self._folder)!r}: {error.strerror}") from error
