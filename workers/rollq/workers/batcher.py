"""Many small calls combined into few large ones."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """Gathers what is submitted for a moment and while calls run, then makes one call for all of it.

    `call` takes items and returns one answer each; it runs in a thread, up to `parallel` calls at a time, so that one
    can prepare its data while the server works on another's.
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
        self._senders: set[asyncio.Task[None]] = set()

    def submit(self, item: T) -> asyncio.Future[R]:
        """Send `item` with the next call. The future gets its answer, or the call's error.

        A future that is cancelled does not take its item back.
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
        self._idle -= 1
        sender = asyncio.get_running_loop().create_task(self._send())
        self._senders.add(sender)
        sender.add_done_callback(self._senders.discard)

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._limit], self._waiting[self._limit :]
            await self._send_batch(batch)
        self._idle += 1

    async def _send_batch(self, batch: Sequence[tuple[T, asyncio.Future[R]]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._executor, self._call, [item for item, _ in batch])
        except Exception as error:  # noqa: BLE001 - it is delivered to every caller
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)
