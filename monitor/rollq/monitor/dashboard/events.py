"""Server-sent events: the latest reading, once per second for each open page."""

import asyncio
import logging
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from rollq.buffer.listening.connections import State, note

log = logging.getLogger(__name__)

EVERY_S = 1.0
SLOW_S = 10.0
"""How long a page may take to receive an event."""
HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


class Events:
    """An ASGI app whose answer never ends. All watchers share a reading. Nothing is queued for a watcher that does not
    read.

    A slow watcher misses readings, and is dropped if one event takes `slow_s`.
    """

    def __init__(self, read: Callable[[], bytes], *, slow_s: float = SLOW_S) -> None:
        """`read` returns the latest event. It is called in a thread, once for all waiting watchers."""
        self._read, self._slow_s = read, slow_s
        self._stop = asyncio.Event()
        self._reading: asyncio.Task[bytes] | None = None

    def stop(self) -> None:
        """End all answers."""
        self._stop.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send readings until the watcher leaves, or is dropped."""
        note(State.STREAMING)
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        over = [asyncio.create_task(_left(receive)), asyncio.create_task(self._stop.wait())]
        try:
            while not any(task.done() for task in over):
                event = await self._latest()
                async with asyncio.timeout(self._slow_s):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await asyncio.wait(over, timeout=EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            log.info("a page that has not read for %.0f s is dropped", self._slow_s)
        finally:
            for task in over:
                task.cancel()

    async def _latest(self) -> bytes:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(run_in_threadpool(self._read))
        return await asyncio.shield(self._reading)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
