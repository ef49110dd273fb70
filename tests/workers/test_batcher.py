"""Many small calls made as few large ones."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollq.workers.batcher import Batcher
from support.waiting import PATIENCE_S


def test_what_is_submitted_together_goes_in_one_call_with_an_answer_each() -> None:
    calls: list[list[int]] = []

    def double(items: Sequence[int]) -> list[int]:
        calls.append(list(items))
        return [2 * item for item in items]

    async def scene() -> list[int]:
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(double, executor, gather_s=0.001, limit=4)
            return await asyncio.gather(*(batcher.submit(item) for item in range(10)))

    assert asyncio.run(scene()) == [2 * item for item in range(10)]
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_an_error_reaches_everybody_in_its_call_and_nobody_else() -> None:
    def fail_on_first(items: Sequence[int]) -> list[int]:
        if 0 in items:
            raise OSError("lost")
        return list(items)

    async def scene() -> list[object]:
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(fail_on_first, executor, gather_s=0, limit=2)
            return await asyncio.gather(*(batcher.submit(item) for item in range(4)), return_exceptions=True)

    first, second, *rest = asyncio.run(scene())
    assert isinstance(first, OSError)
    assert isinstance(second, OSError)
    assert rest == [2, 3]


@pytest.mark.parametrize("parallel", [1, 2])
def test_as_many_calls_run_at_a_time_as_allowed(parallel: int) -> None:
    under_way = most = 0
    lock = threading.Lock()
    both = threading.Barrier(parallel)

    def call(items: Sequence[int]) -> list[int]:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        both.wait(PATIENCE_S)
        with lock:
            under_way -= 1
        return list(items)

    async def scene() -> None:
        with ThreadPoolExecutor(4) as executor:
            batcher = Batcher(call, executor, gather_s=0, limit=1, parallel=parallel)
            futures = []
            for item in range(4):
                futures.append(batcher.submit(item))
                await asyncio.sleep(0.01)
            assert await asyncio.gather(*futures) == [0, 1, 2, 3]

    asyncio.run(scene())
    assert most == parallel


def test_a_cancelled_answer_does_not_take_its_item_back() -> None:
    seen: list[int] = []

    def remember(items: Sequence[int]) -> Sequence[int]:
        seen.extend(items)
        return items

    async def scene() -> int:
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(remember, executor, gather_s=0, limit=9)
            batcher.submit(1).cancel()
            return await batcher.submit(2)

    assert asyncio.run(scene()) == 2
    assert seen == [1, 2]


def test_what_went_when_another_call_ended_is_not_followed_by_an_empty_call() -> None:
    calls: list[list[int]] = []
    go = threading.Event()

    def call(items: Sequence[int]) -> Sequence[int]:
        calls.append(list(items))
        if 0 in items:
            go.wait(PATIENCE_S)
        return items

    async def scene() -> None:
        with ThreadPoolExecutor(2) as executor:
            batcher = Batcher(call, executor, gather_s=0.2, limit=2, parallel=2)
            full = [batcher.submit(0), batcher.submit(0)]  # as many as the limit: they go at once
            late = batcher.submit(1)
            go.set()
            assert await asyncio.gather(*full, late) == [0, 0, 1]
            await asyncio.sleep(0.4)  # until what is gathered would have gone

    asyncio.run(scene())
    assert calls == [[0, 0], [1]]
