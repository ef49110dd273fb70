"""Calls user-written functions (judges, filters, tools, environments) without blocking the worker."""

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from rollq.workers.user_code.call_slots import CallSlot, CallSlots

log = logging.getLogger(__name__)

T = TypeVar("T")

LET_GO_S = 1.0
"""How many seconds cancelled work may take to end before it is abandoned."""
MAX_THREADS = 64
"""The most concurrent calls to one blocking function. Hanging calls count until they end."""

Calls = SimpleQueue[Callable[[], None]]


class ThreadCache:
    """Threads that do not delay the exit. An idle thread is reused; otherwise a new thread starts."""

    def __init__(self) -> None:
        self._idle: list[Calls] = []

    def run(self, call: Callable[[], None]) -> None:
        """Run `call` in a thread."""
        try:
            calls = self._idle.pop()
        except IndexError:
            calls = Calls()
            threading.Thread(target=self._serve, args=(calls,), name="user code", daemon=True).start()
        calls.put(call)

    def _serve(self, calls: Calls) -> None:
        """Run one call after another, for the thread's whole life."""
        while True:
            calls.get()()
            self._idle.append(calls)


_THREADS = ThreadCache()


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A sync or async function with a timeout, which is None if the function enforces its timeout itself. A `quick`
    function needs neither a timeout nor a thread."""

    function: Callable[..., Any]
    timeout_s: float | None
    slots: CallSlots
    quick: bool

    @classmethod
    def wrap(cls, function: Callable[..., Any], timeout_s: float | None, *, quick: bool) -> "UserFunction":
        """Wrap a function, with a separate limit on its threads."""
        return cls(function, timeout_s, CallSlots(MAX_THREADS), quick)

    async def __call__(self, *args: Any) -> Any:
        """Call the function. Raises its exceptions, `CallsHang`, and `TimeoutError` with a message if the call takes
        too long. The wait for a thread does not count towards the timeout."""
        if self.quick:
            return self.function(*args)
        if inspect.iscoroutinefunction(self.function):
            return await self._within(self.function(*args))
        slot = await self.slots.take(self.timeout_s)
        return await called_in_slot(slot, lambda done: self._within(self._in_thread(args, done)))

    async def _in_thread(self, args: tuple[Any, ...], done: Callable[[], None]) -> Any:
        answer = await in_thread(self.function, *args, done=done)
        return await answer if inspect.isawaitable(answer) else answer

    async def _within(self, work: Awaitable[Any]) -> Any:
        try:
            return await within(self.timeout_s, work)
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"took longer than {self.timeout_s:g} s") from error


async def called_in_slot(slot: CallSlot, call: Callable[[Callable[[], None]], Awaitable[T]]) -> T:
    """Await a call that releases its slot when it has ended."""
    try:
        return await call(slot.release)
    except BaseException:
        slot.leave()
        raise


@contextmanager
def guarded() -> Iterator[None]:
    """Guard code that runs or reads user-written objects. Raises `RuntimeError` in place of exceptions that would end
    the worker: `SystemExit`, and the interrupt of a blocking function."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(repr(error)) from error


async def contained(work: Awaitable[T]) -> T:
    """Await user-written work, `guarded`. Also raises `RuntimeError` in place of a cancellation by the work itself,
    which would look like a request to stop the group."""
    try:
        with guarded():
            return await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("it was cancelled from within") from error


async def within(limit_s: float | None, work: Awaitable[T], done: Callable[[], None] = lambda: None) -> T:
    """Await user-written work, `contained`, for at most `limit_s`; None means no limit.

    `done` is called when the work has ended. Work that ignores its cancellation is abandoned. Raises a `TimeoutError`
    without a message.
    """
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
            log.warning("%s ignores its cancellation and is abandoned", task.get_coro())
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    if not in_time:
        raise TimeoutError
    return task.result()


async def in_thread(function: Callable[..., Any], *args: Any, done: Callable[[], None]) -> Any:
    """Await `function(*args)` in a thread that does not delay the exit. `done` is called when the function has ended.

    In a thread pool, a call that hangs would occupy a thread and block the process's exit. Here, a thread is reused
    after its call has ended, and a new thread starts if none is idle.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: Exception | None) -> None:
        done()
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):  # futures refuse it, and coroutines cannot raise it
            replaced = RuntimeError("the function raised StopIteration")
            replaced.__cause__ = error
            future.set_exception(replaced)
        else:
            future.set_exception(error)

    def run() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = function(*args)
        except Exception as raised:  # noqa: BLE001 - it is delivered to the caller
            error = raised
        except BaseException as raised:  # noqa: BLE001 - such as SystemExit, which would end the event loop
            error = RuntimeError(repr(raised))
            error.__cause__ = raised  # with the line that raised it
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, error)

    _THREADS.run(run)
    return await future
