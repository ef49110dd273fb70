"""Weight following: the engine serves what the trainer published last.

Invariant: weights reach the engine only when their bytes are those that were announced; refused or failed ones leave
the old version serving, are logged once, and are tried again. A wake-up saves waiting; a lost one costs one poll.
"""

import asyncio
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from types import TracebackType

from redis.exceptions import RedisError

from rollq.buffer.errors import ServerError, WeightsError
from rollq.buffer.values import Control, LiveModel
from rollq.buffer.weights import load_weights
from rollq.workers.calls import BufferCalls
from rollq.workers.engine import EngineDead, SwapMode, WeightsVersion
from rollq.workers.engine_host import EngineHost

log = logging.getLogger(__name__)

POLL_S = 1.0
LISTEN_S = 0.25
"""How soon the thread that listens notices the end."""
LAST_LISTEN_S = 4 * LISTEN_S
"""How long the end waits for that thread: it hangs while the server is away."""
REST_S = 0.05
"""At most so often are wake-ups answered: every put of every worker is one."""
RETRY_S = 2.0


class Following:
    """Loads what is published, and knows whether the run is paused."""

    def __init__(
        self, calls: BufferCalls, tasks: tuple[str, ...], host: EngineHost, mode: SwapMode, folder: Path | None
    ) -> None:
        """`folder`: where downloaded weights go, in a folder of their own that is removed at the end."""
        self.host = host
        self.paused = False
        self.changed: Callable[[], None] = lambda: None
        self._calls = calls
        self._tasks = tasks
        self._mode = mode
        self._given_folder = folder
        self._refused: WeightsVersion | None = None
        self._looked_s = -inf

    def __enter__(self) -> "Following":
        parent = self._given_folder
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="rollq-weights-", dir=parent))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    async def run(self) -> None:
        """Follow until cancelled. Raises `StoreLost`."""
        stop, woken = threading.Event(), asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, woken.set)
        listening = asyncio.create_task(self._calls(self._listen, stop, wake))
        try:
            while True:
                woken.clear()
                await self._look()
                await asyncio.sleep(REST_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await woken.wait()
        finally:
            stop.set()
            await asyncio.wait([listening], timeout=LAST_LISTEN_S)

    def _listen(self, stop: threading.Event, wake: Callable[[], object]) -> None:
        """Call `wake` at wake-ups, until `stop`. One thread owns the subscription from its begin to its end."""
        while not stop.is_set():
            try:
                with self._calls.buffer.events() as events:
                    while not stop.is_set():
                        if events.wait(LISTEN_S):
                            wake()
            except (RedisError, OSError):
                stop.wait(LISTEN_S)

    async def _look(self) -> None:
        """Serve the live model, if it is another than the one that serves."""
        if monotonic() - self._looked_s >= POLL_S:
            self._looked_s = monotonic()
            self._note_pause(await self._calls(self._read_paused))
        live = await self._calls(self._calls.buffer.live_model)
        if live is None or self.host.version is None:
            return
        wanted = WeightsVersion(live.epoch, live.version, live.digest)
        if wanted == self.host.version and self.host.published.is_set():
            return
        try:
            folder = await self._calls(self._load, live)
            await self.host.swap(folder, wanted, self._mode)
        except WeightsError as error:
            if wanted != self._refused:
                log.error("weights of version %d refused, the old ones go on serving: %s", wanted.version, error)
            self._refused = wanted
            await asyncio.sleep(RETRY_S)
        except EngineDead as error:
            log.warning("the engine died while it took weights of version %d: %s", wanted.version, error)
        else:
            log.info("serving weights of version %d (epoch %d)", wanted.version, wanted.epoch)
            self._refused = None
            self.changed()

    def _read_paused(self) -> bool:
        return all(self._calls.buffer.clock(task).control is Control.PAUSE for task in self._tasks)

    def _note_pause(self, paused: bool) -> None:
        if paused != self.paused:
            log.info("the run is paused: no new groups" if paused else "the run goes on")
            self.paused = paused
            self.changed()

    def _load(self, live: LiveModel) -> Path:
        if not live.uri:  # nothing to load: only an engine that reads no weights takes an empty folder
            return self._folder
        try:
            return load_weights(self._calls.buffer, live.uri, live.digest, self._folder)
        except ServerError:
            raise
        except OSError as error:
            raise WeightsError(f"weights cannot be written to {str(self._folder)!r}: {error.strerror}") from error
