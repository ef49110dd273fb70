"""Slots of calls, and calls that hang."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollq.workers.user_code import call_slots
from rollq.workers.user_code.call_slots import CallsHang, CallSlots
from rollq.workers.user_code.calls import UserFunction

SOON_S = 0.01


@pytest.fixture(autouse=True)
def quick_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_slots, "HANGS_S", SOON_S)


def test_a_call_waits_for_one_that_ends() -> None:
    async def scene() -> None:
        slots = CallSlots(1)
        first = await slots.take(60)
        second = asyncio.create_task(slots.take(60))
        cancelled = asyncio.create_task(slots.take(60))
        await asyncio.sleep(0)
        cancelled.cancel()
        first.release()
        (await second).release()
        (await slots.take(60)).release()

    asyncio.run(scene())


def test_nobody_waits_while_every_call_hangs_and_all_go_on_when_one_ends() -> None:
    async def scene() -> None:
        slots = CallSlots(2)
        hung = [await slots.take(SOON_S) for _ in range(2)]
        waiting = [asyncio.create_task(slots.take(60)) for _ in range(3)]
        await asyncio.sleep(0)
        for slot in hung:
            slot.leave()
        done, _ = await asyncio.wait(waiting)
        assert [type(task.exception()) for task in done] == [CallsHang] * 3
        with pytest.raises(CallsHang, match="2 earlier calls hang"):
            await slots.take(60)
        hung[0].release()
        (await slots.take(60)).release()

    asyncio.run(scene())


def test_a_turn_that_was_given_to_a_cancelled_call_goes_to_the_next() -> None:
    async def scene() -> None:
        slots = CallSlots(1)
        first = await slots.take(60)
        gone, next_one = (asyncio.create_task(slots.take(60)) for _ in range(2))
        await asyncio.sleep(0)
        first.release()
        gone.cancel()
        (await next_one).release()

    asyncio.run(scene())


def test_waiting_for_a_thread_is_not_the_time_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollq.workers.user_code.calls.MAX_THREADS", 1)
    monkeypatch.setattr(call_slots, "HANGS_S", 60.0)

    async def scene() -> list[int]:
        begin: asyncio.Event = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(number: int) -> int:
            asyncio.run_coroutine_threadsafe(begin.wait(), loop).result()
            return number

        function = UserFunction.wrap(slow, 30, quick=False)
        calls = [asyncio.create_task(function(number)) for number in range(20)]
        await asyncio.sleep(0)
        begin.set()
        found: list[int] = await asyncio.gather(*calls)
        return found

    assert asyncio.run(scene()) == list(range(20))


def stops(*_: Any) -> Any:
    return next(iter(()))


async def stops_later(*_: Any) -> Any:
    raise StopIteration


@pytest.mark.parametrize("function", [stops, stops_later])
def test_a_function_that_raises_stop_iteration_fails_at_once(function: Callable[..., Any]) -> None:
    async def scene() -> None:
        await UserFunction.wrap(function, 600, quick=False)(1)

    with pytest.raises(RuntimeError) as caught:
        asyncio.run(scene())
    assert isinstance(caught.value.__cause__, StopIteration)
