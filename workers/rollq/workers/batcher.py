"""Many small calls made as few large ones."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """Gathers what is submitted for a moment and while the last call runs, then makes one call for all of it.

    `call` takes the items in order and returns one answer each; it runs in a thread, one call at a time.
    """

    def __init__(
        self, call: Callable[[Sequence[T]], Sequence[R]], executor: Executor, *, gather_s: float, limit: int
    ) -> None:
        self._call = call
        self._executor = executor
        self._gather_s = gather_s
        self._limit = limit
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._sender: asyncio.Task[None] | None = None

    def submit(self, item: T) -> asyncio.Future[R]:
        """Have `item` go with the next call. The future is its answer, or the call's error.

        A future that is cancelled does not take its item back.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._waiting.append((item, future))
        if self._sender is None:
            self._sender = loop.create_task(self._send())
        return future

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._gather_s)
        while self._waiting:
            batch, self._waiting = self._waiting[: self._limit], self._waiting[self._limit :]
            items = [item for item, _ in batch]
            try:
                answers = await loop.run_in_executor(self._executor, self._call, items)
            except Exception as error:  # noqa: BLE001 - it is delivered to everybody who waits
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
        self._sender = None
