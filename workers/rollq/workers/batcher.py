"""Combines many small calls into a few large ones."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """Collects items submitted during a short wait or while calls run, then sends up to `limit` of them in one call.

    `call` takes items and returns one answer for each. Calls run in threads, up to `parallel` at a time, so one call
    can prepare its data while the server works on another.
    """

    def __init__(
        self,
        call: Callable[[Sequence[T]], Sequence[R]],
        executor: Executor,
        *,
        gather_s: float,
        limit: int,
        parallel: int = 1,
    ) -> None:
        self._call = call
        self._executor = executor
        self._gather_s = gather_s
        self._limit = limit
        self._idle = parallel
        self._gathering: asyncio.TimerHandle | None = None
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []

    def submit(self, item: T) -> asyncio.Future[R]:
        """Send `item` with the next call. The future gets the item's answer, or the call's error.

        Cancelling the future does not withdraw the item.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._waiting.append((item, future))
        if self._idle and len(self._waiting) >= self._limit:
            self._start()
        elif self._idle and self._gathering is None:
            self._gathering = loop.call_later(self._gather_s, self._start)
        return future

    def _start(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._waiting:  # otherwise, a call that ended has sent them
            self._idle -= 1
            self._send()

    def _send(self) -> None:
        """Make the next call. Callbacks, not a task, chain the steps: each step of a task would take a turn of the
        event loop, and agents wait for each record."""
        batch, self._waiting = self._waiting[: self._limit], self._waiting[self._limit :]
        items = [item for item, _ in batch]
        try:
            answers = asyncio.get_running_loop().run_in_executor(self._executor, self._call, items)
        except RuntimeError as error:  # the executor was shut down
            answers = asyncio.get_running_loop().create_future()
            answers.set_exception(error)
        answers.add_done_callback(partial(self._answered, [future for _, future in batch]))

    def _answered(self, futures: Sequence[asyncio.Future[R]], answers: asyncio.Future[Sequence[R]]) -> None:
        if self._waiting:
            self._send()
        else:
            self._idle += 1
        waiting = [future for future in futures if not future.done()]
        if answers.cancelled():  # the executor was shut down before the call began
            for future in waiting:
                future.cancel()
        elif (error := answers.exception()) is not None:
            for future in waiting:
                future.set_exception(error)
        else:
            for future, answer in zip(futures, answers.result(), strict=True):
                if not future.done():
                    future.set_result(answer)
