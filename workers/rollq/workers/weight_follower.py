"""Weight following: the engine serves what the trainer published last.

Invariant: weights reach the engine only when their bytes are those that were announced, or come from the trainer
itself; refused or failed ones leave the old version serving, are logged once, and are tried again.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rollq.buffer.errors import ConfigError, ServerError, WeightsError
from rollq.buffer.replies import LiveModel
from rollq.buffer.weights.broadcast_log import round_number
from rollq.buffer.weights.manifest import Verify
from rollq.buffer.weights.store import load_weights
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import EngineDead, SwapMode, WeightsVersion
from rollq.workers.engines.receiver import BroadcastReceiver, TooLate
from rollq.workers.wakeups import Listener

log = logging.getLogger(__name__)

RETRY_S = 2.0


class WeightFollower:
    """Loads what is published."""

    def __init__(
        self,
        calls: BufferCalls,
        host: EngineHost,
        listener: Listener,
        mode: SwapMode,
        folder: Path | None,
        verify: Verify,
        worker: str,
    ) -> None:
        """`folder`: where downloaded weights go, in a folder of their own that is removed at the end."""
        self.changed: Callable[[], None] = lambda: None
        self.swaps = 0
        self.swap_pause_s = 0.0
        self._host = host
        self._calls = calls
        self._listener = listener
        self._mode = mode
        self._given_folder = folder
        self._verify = verify
        self._rounds = BroadcastReceiver(calls, worker)
        self._refused: WeightsVersion | None = None
        self._one_at_a_time = asyncio.Lock()

    def __enter__(self) -> "WeightFollower":
        parent = self._given_folder
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
        """Follow until cancelled, except while the engine sleeps. Raises `StoreLost`."""
        while True:
            if not self._host.asleep and not await self.catch_up():
                await asyncio.sleep(RETRY_S)
            await self._listener.wait()

    async def catch_up(self) -> bool:
        """Serve the live model, if it is another than the one that serves. False when they were refused."""
        async with self._one_at_a_time:
            live = await self._calls(self._calls.buffer.live_model)
            if live is None or self._host.version is None:
                return True
            wanted = WeightsVersion(live.epoch, live.version, live.digest)
            if wanted == self._host.version and self._host.published.is_set():
                return True
            return await self._serve(live, wanted)

    async def _serve(self, live: LiveModel, wanted: WeightsVersion) -> bool:
        try:
            if (number := round_number(live.uri)) is None:
                folder = await self._calls(self._load, live)
                swap_pause_s = await self._host.swap(folder, wanted, self._mode)
            elif wanted == self._refused:  # what does not fit will not fit the next time
                return False
            else:
                incoming = await self._rounds.enter(live, number)
                swap_pause_s = await self._host.receive(incoming, wanted, self._mode)
        except TooLate as error:
            log.info("weights of version %d come later: %s", wanted.version, error)
            return False
        except WeightsError as error:
            if wanted != self._refused:
                rest = "the old ones go on serving" if self._host.published.is_set() else "and there are no others yet"
                log.error("weights of version %d refused, %s: %s", wanted.version, rest, error)
            self._refused = wanted
            return False
        except EngineDead as error:
            log.warning("the engine died while it took weights of version %d: %s", wanted.version, error)
            return True
        if swap_pause_s is None:  # it fell asleep meanwhile; whoever wakes it catches up
            return True
        log.info(
            "serving weights of version %d (epoch %d); generation stood still for %.3f s",
            wanted.version,
            wanted.epoch,
            swap_pause_s,
        )
        self.swaps += 1
        self.swap_pause_s += swap_pause_s
        self._refused = None
        self.changed()
        return True

    def _load(self, live: LiveModel) -> Path:
        if not live.uri:  # nothing to load: only an engine that reads no weights takes an empty folder
            return self._folder
        try:
            return load_weights(self._calls.buffer, live.uri, live.digest, self._folder, self._verify)
        except ServerError:
            raise
        except OSError as error:
            raise WeightsError(f"weights cannot be written to {str(self._folder)!r}: {error.strerror}") from error
