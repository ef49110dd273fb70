"""The gate in front of an engine. It holds requests back while weights change or the engine sleeps.

Invariant: a request reaches the engine only while no swap keeps the gate closed and the engine is awake. Weights change
when the running requests that must not outlive the swap have ended: in the modes `wait` and `abort`, all requests
(`abort` first stops most of them); in mode `keep`, requests that must finish or that the engine cannot continue. After
a swap succeeds or fails, waiting requests are let in.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rollq.workers.engines.protocol import EngineDead, Request, SwapMode, WeightsVersion

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Call:
    """One request at the gate, waiting or running.

    The engine sets `version`, the version of its weights, when it starts the request; `version` is None while the
    request waits. An `aborted` request was asked to end with its tokens so far.
    """

    request: Request
    version: WeightsVersion | None = None
    aborted: bool = False
    answer: "asyncio.Future[Any]" = field(init=False)

    @property
    def running(self) -> bool:
        """Whether the request is running in the engine."""
        return self.version is not None and not self.answer.done()


C = TypeVar("C", bound=Call)
Stop = Callable[[Sequence[C]], Awaitable[None]]
"""Ends running calls with their tokens so far. Calls that still run afterwards are cancelled."""


class RequestGate(Generic[C]):
    """Lets requests into an engine, and allows one swap at a time. Closed until `start`."""

    def __init__(self, stop: Stop[C] | None = None, opened: Callable[[], None] = lambda: None) -> None:
        """The gate calls `stop` to end running calls in the engine; by default, it only cancels their tasks. It calls
        `opened` whenever requests may start again."""
        self.calls: set[C] = set()
        self._stop = stop
        self._opened = opened
        self._open = asyncio.Event()
        self._lock = asyncio.Lock()
        self._swapping = self._asleep = False
        self._dead: str | None = "the engine has not been started"

    def start(self) -> None:
        """Let requests in: the engine is ready."""
        self._dead = None
        self._update()

    @property
    def is_open(self) -> bool:
        """Whether requests may start now."""
        return self._open.is_set()

    @property
    def running(self) -> list[C]:
        """The calls that are running in the engine."""
        return [call for call in self.calls if call.running]

    def check_alive(self) -> None:
        """Raise `EngineDead` if the engine has not been started or has failed."""
        if self._dead is not None:
            raise EngineDead(self._dead)

    def fail(self, reason: str) -> None:
        """End all calls with `EngineDead`, and refuse new ones. The first reason counts."""
        self._dead = self._dead or reason
        _cancel(self.calls)
        self._update()

    async def serve(self, call: C, ask: Callable[[C], Awaitable[T]]) -> T | None:
        """Call `ask(call)` as soon as the gate is open, and return its result; None when the call was stopped.

        `ask` must set `call.version` when the request starts, with the gate open. Raises the exceptions of `ask`, and
        `EngineDead`.
        """
        self.check_alive()
        call.version = None
        call.answer = asyncio.ensure_future(self._when_open(call, ask))
        self.calls.add(call)
        try:
            await asyncio.wait([call.answer])
        finally:
            call.answer.cancel()
            self.calls.discard(call)
        if call.answer.cancelled():
            self.check_alive()
            return None
        result: T = call.answer.result()
        return result

    async def _when_open(self, call: C, ask: Callable[[C], Awaitable[T]]) -> T:
        while not self._open.is_set():  # the gate may have closed again before this task runs
            await self._open.wait()
        return await ask(call)

    async def abort(self, requests: Collection[Request]) -> None:
        """Stop these requests, running or waiting. Unknown requests are ignored."""
        wanted = set(requests)
        await self._end([call for call in self.calls if call.request in wanted])

    @asynccontextmanager
    async def swap(self) -> AsyncIterator[None]:
        """Hold the lock for one swap. Requests still enter until `closed`. Raises `EngineDead`."""
        async with self._lock:
            self.check_alive()
            yield

    @asynccontextmanager
    async def closed(
        self, mode: SwapMode, *, outlives: Callable[[C], bool] = lambda _: True, interrupt: bool = False
    ) -> AsyncIterator[None]:
        """Keep the gate closed. The body runs once all requests that hold up the swap have ended.

        In mode `keep`, a running request outlives the swap unless it must finish or `outlives` returns False for it. An
        engine that cannot keep running requests sets `interrupt`: the swap ends them, `serve` returns None, and their
        callers ask again afterwards. Raises `EngineDead`.
        """
        self._swapping = True
        self._update()
        try:
            await self._drain(mode, outlives, interrupt)
            self.check_alive()
            yield
        finally:
            self._swapping = False
            self._update()

    async def _drain(self, mode: SwapMode, outlives: Callable[[C], bool], interrupt: bool) -> None:
        ending = self.running
        interruptible = [call for call in ending if not call.request.must_finish]
        if mode is SwapMode.ABORT:
            await self._end(interruptible)
        elif mode is SwapMode.KEEP and interrupt:
            _cancel(interruptible)
        elif mode is SwapMode.KEEP:
            staying = set(filter(outlives, interruptible))
            ending = [call for call in ending if call not in staying]
        await _ended(ending)

    async def _end(self, calls: Sequence[C]) -> None:
        for call in calls:
            call.aborted = True
        running = [call for call in calls if call.running]
        if running and self._stop is not None and self._dead is None:
            await self._stop(running)
        _cancel(calls)

    async def sleep(self) -> None:
        """Close the gate until `wake`, and stop all running requests. Raises `EngineDead`."""
        self.check_alive()
        self._asleep = True
        self._update()
        running = self.running
        await self._end(running)
        await _ended(running)
        self.check_alive()

    def wake(self) -> None:
        """Let requests in again after `sleep`."""
        self._asleep = False
        self._update()

    def _update(self) -> None:
        if self._swapping or self._asleep or self._dead is not None:
            self._open.clear()
        else:
            self._open.set()
            self._opened()


class Gated:
    """The members of an `Engine` that need only its gate."""

    _gate: RequestGate[Any]

    async def abort(self, requests: Collection[Request]) -> None:
        """See `Engine.abort`."""
        await self._gate.abort(requests)

    async def sleep(self) -> None:
        """Stop the running requests, and hold new ones back. No memory is freed."""
        await self._gate.sleep()

    async def wake(self) -> None:
        """Take requests again."""
        self._gate.wake()


def _cancel(calls: Collection[Call]) -> None:
    for call in calls:
        call.answer.cancel()


async def _ended(calls: Sequence[Call]) -> None:
    """Wait until the engine has ended `calls`."""
    if calls:
        await asyncio.wait([call.answer for call in calls])
