"""Calls of functions that users write (judges, filters, tools, environments), so that none can hold up the worker."""

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

LET_GO_S = 1.0
"""How long something that is cancelled may take to end; then nobody waits for it any more."""
MAX_THREADS = 64
"""Calls of one blocking function under way at the same time; those that hang count until they end."""

_idle: "list[SimpleQueue[Callable[[], None]]]" = []
"""What threads that have nothing to do wait for."""


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function, sync or async, with the time that a call may take; None: it has a timeout of its own.
    `quick`: it needs no thread either."""

    function: Callable[..., Any]
    timeout_s: float | None
    threads: asyncio.Semaphore
    quick: bool

    @classmethod
    def wrap(cls, function: Callable[..., Any], timeout_s: float | None, *, quick: bool) -> "UserFunction":
        """Give a function a separate limit of threads."""
        return cls(function, timeout_s, asyncio.Semaphore(MAX_THREADS), quick)

    async def __call__(self, *args: Any) -> Any:
        """What the function returns. Raises what it raises; `TimeoutError` with words when it takes too long."""
        if self.quick:
            return self.function(*args)
        try:
            return await within(self.timeout_s, self._answer(args))
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"took longer than {self.timeout_s:g} s") from error

    async def _answer(self, args: tuple[Any, ...]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(*args)
        await self.threads.acquire()
        answer = await in_thread(self.function, *args, done=self.threads.release)
        return await answer if inspect.isawaitable(answer) else answer


async def contained(work: Awaitable[T]) -> T:
    """Await what users wrote. What would end more than its sample is raised as `RuntimeError`: `SystemExit`, which ends
    the worker, and a cancellation that nobody asked for (it awaited something of its own that was cancelled), which
    would pass for the wish that the group be stopped."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(repr(error)) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("it was cancelled from within") from error


async def within(limit_s: float | None, work: Awaitable[T], done: Callable[[], None] = lambda: None) -> T:
    """Await what users wrote, `contained`, for `limit_s` at most; None: as long as it takes. `done` is called when it
    has ended: what does not even end when it is cancelled is left to itself. Raises `TimeoutError` without words."""
    task = asyncio.ensure_future(contained(work))
    task.add_done_callback(lambda _: done())
    try:
        await asyncio.wait([task], timeout=limit_s)
        in_time = task.done()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=LET_GO_S)
        if not task.done():
            log.warning("%s does not end though it is cancelled; it is left to itself", task.get_coro())
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    if not in_time:
        raise TimeoutError
    return task.result()


async def in_thread(function: Callable[..., Any], *args: Any, done: Callable[[], None]) -> Any:
    """Await `function(*args)` in a thread that no exit waits for; `done` is called when it has ended.

    A thread pool will not do: a call that hangs would hold one of its threads, and the end of the process. Here a
    thread serves again when its call has ended, and there is always another one.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: Exception | None) -> None:
        done()
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = function(*args)
        except Exception as raised:  # noqa: BLE001 - it is delivered to whoever awaits
            error = raised
        except BaseException as raised:  # noqa: BLE001 - such as SystemExit, which would end the event loop
            error = RuntimeError(repr(raised))
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, error)

    try:
        calls = _idle.pop()
    except IndexError:
        calls = SimpleQueue()
        threading.Thread(target=_serve, args=(calls,), name="user code", daemon=True).start()
    calls.put(run)
    return await future


def _serve(calls: "SimpleQueue[Callable[[], None]]") -> None:
    """The life of a thread: one call after the other."""
    while True:
        calls.get()()
        _idle.append(calls)
