"""Calls the buffer from the event loop. The buffer is synchronous and thread-safe, so each call runs in one of a few
threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from rollq.buffer.roles import WorkerBuffer

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 16
"""The most concurrent calls: two puts, lease, hand back, salvage, record, renew, report, live model, controls,
wake-ups, offer, borrow, and ending loans, with two to spare."""


class BufferCalls:
    """A buffer and the threads that call it: `await calls(calls.buffer.live_model)`."""

    def __init__(self, buffer: WorkerBuffer) -> None:
        self.buffer = buffer
        self.threads = ThreadPoolExecutor(THREADS, "buffer")
        self._turn = asyncio.Lock()

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await `function(...)` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, partial(function, *args, **kwargs))

    async def poll(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await `function(...)`, one of the calls made every second.

        These calls take turns, so they need only one connection. In a cluster they run concurrently, since a call may
        wait for its primary.
        """
        if self.buffer.servers.spread:
            return await self(function, *args, **kwargs)
        async with self._turn:
            return await self(function, *args, **kwargs)

    def close(self) -> None:
        """Stop starting calls, without waiting for running ones."""
        self.threads.shutdown(wait=False, cancel_futures=True)
