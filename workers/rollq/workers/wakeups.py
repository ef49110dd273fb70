"""Wake-ups by new weights and by pauses, from one thread that listens to as many parts of the worker as ask.

Invariant: a wake-up saves waiting and nothing else; whoever loses one looks again after `POLL_S`.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from redis.exceptions import RedisError

from rollq.buffer.errors import ServerError
from rollq.buffer.store.events import EventKind
from rollq.workers.buffer_calls import BufferCalls

POLL_S = 1.0
LISTEN_S = 0.25
"""How soon the thread that listens notices the end."""
LAST_LISTEN_S = 4 * LISTEN_S
"""How long the end waits for that thread: it hangs while the server is away."""
REST_S = 0.05
"""At most so often are wake-ups answered."""


class Wakeups:
    """Tells its `Listener`s that weights were published, or a task was paused or goes on."""

    def __init__(self, calls: BufferCalls) -> None:
        self._calls = calls
        self._listeners: list[asyncio.Event] = []

    def listener(self) -> "Listener":
        """One more part that is told."""
        listener = Listener()
        self._listeners.append(listener.woken)
        return listener

    async def run(self) -> None:
        """Listen until cancelled."""
        stop = threading.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, self._wake)
        listening = asyncio.create_task(self._calls(self._listen, stop, wake))
        try:
            await asyncio.shield(listening)
        finally:
            stop.set()
            await asyncio.wait([listening], timeout=LAST_LISTEN_S)

    def _wake(self) -> None:
        for woken in self._listeners:
            woken.set()

    def _listen(self, stop: threading.Event, wake: Callable[[], object]) -> None:
        """Call `wake` at wake-ups, until `stop`. One thread owns the subscription from its begin to its end."""
        while not stop.is_set():
            try:
                with self._calls.buffer.events(EventKind.PUBLISH, EventKind.CONTROL) as events:
                    while not stop.is_set():
                        if events.wait(LISTEN_S):
                            wake()
            except (RedisError, ServerError, OSError):
                stop.wait(LISTEN_S)


class Listener:
    """One part's wake-ups."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()

    async def wait(self, poll_s: float = POLL_S) -> None:
        """Wait for something to happen since the last wait, at most `poll_s`."""
        await asyncio.sleep(REST_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(poll_s):
                await self.woken.wait()
        self.woken.clear()
