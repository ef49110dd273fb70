"""The gate on an engine without a model: a request runs until it is let go, and shows when it was started."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from rollq.workers.engines.gate import Call, RequestGate
from rollq.workers.engines.protocol import EngineDead, Request, Sampling, SwapMode, WeightsVersion
from support.waiting import PATIENCE_S

ASK = Request(np.array([1], np.int32), Sampling(max_tokens=1))
HELD = replace(ASK, must_finish=True)


class HandEngine:
    """Runs each request until `release`; `stopped` are those that the gate had it stop."""

    def __init__(self, stop: bool = False) -> None:
        self.gate: RequestGate[Call] = RequestGate(self._stop if stop else None)
        self.gate.start()
        self.stopped: list[Request] = []
        self.version = WeightsVersion(0, 0, "")
        self._released = asyncio.Event()
        self._stopped = asyncio.Event()

    def start(self, request: Request) -> "asyncio.Task[WeightsVersion | None]":
        return asyncio.create_task(self.gate.serve(Call(request), self._ask))

    async def _ask(self, call: Call) -> WeightsVersion:
        assert self.gate.is_open
        call.version = self.version
        await self._released.wait()
        return call.version

    async def _stop(self, calls: Sequence[Call]) -> None:
        self.stopped += [call.request for call in calls]

    def release(self) -> None:
        self._released.set()

    async def swap(self, mode: SwapMode, *, interrupt: bool = False) -> None:
        async with self.gate.swap(), self.gate.closed(mode, interrupt=interrupt):
            assert not self.gate.is_open
            await asyncio.sleep(0)
            self.version = WeightsVersion(0, self.version.version + 1, "")


def play(scene: Callable[[HandEngine], Awaitable[None]], *, stop: bool = False) -> None:
    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scene(HandEngine(stop))

    asyncio.run(run())


async def settle() -> None:
    """Let every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_request_starts_only_after_the_swap_that_is_under_way() -> None:
    async def scene(engine: HandEngine) -> None:
        running = engine.start(ASK)
        await settle()
        swap = asyncio.create_task(engine.swap(SwapMode.WAIT))
        await settle()
        late = engine.start(replace(ASK))
        await settle()
        assert (len(engine.gate.running), swap.done()) == (1, False)
        engine.release()
        await swap
        assert [(await running), (await late)] == [WeightsVersion(0, 0, ""), WeightsVersion(0, 1, "")]

    play(scene)


@pytest.mark.parametrize(("mode", "ends"), [(SwapMode.ABORT, True), (SwapMode.KEEP, False)])
def test_a_swap_waits_for_what_must_finish_and_ends_or_keeps_the_rest(mode: SwapMode, ends: bool) -> None:
    async def scene(engine: HandEngine) -> None:
        held, other = engine.start(HELD), engine.start(ASK)
        await settle()
        swap = asyncio.create_task(engine.swap(mode))
        await settle()
        assert (held.done(), other.done(), swap.done()) == (False, ends, False)
        engine.release()
        await swap
        assert (await held) == WeightsVersion(0, 0, "")
        assert ((await other) is None) is ends

    play(scene)


def test_an_interrupted_request_is_not_aborted_and_can_be_served_again_after_the_swap() -> None:
    async def scene(engine: HandEngine) -> None:
        call = Call(ASK)
        running = asyncio.create_task(engine.gate.serve(call, engine._ask))
        await settle()
        await engine.swap(SwapMode.KEEP, interrupt=True)
        assert (await running, call.aborted) == (None, False)
        engine.release()
        assert await engine.gate.serve(call, engine._ask) == WeightsVersion(0, 1, "")

    play(scene)


def test_a_request_that_cannot_outlive_the_swap_is_waited_for() -> None:
    async def scene(engine: HandEngine) -> None:
        doomed, other = replace(ASK), ASK
        for request in (doomed, other):
            engine.start(request)
        await settle()

        async def swap() -> None:
            async with engine.gate.closed(SwapMode.KEEP, outlives=lambda call: call.request is not doomed):
                assert [call.request for call in engine.gate.running] == [other]

        swapping = asyncio.create_task(swap())
        await settle()
        assert not swapping.done()
        await engine.gate.abort([doomed])
        await swapping
        engine.release()
        await settle()

    play(scene)


def test_swaps_take_turns_and_a_failed_one_reopens_the_gate() -> None:
    async def scene(engine: HandEngine) -> None:
        await asyncio.gather(*(engine.swap(SwapMode.KEEP) for _ in range(3)))
        assert engine.version.version == 3
        with pytest.raises(ValueError, match="bad weights"):
            async with engine.gate.swap(), engine.gate.closed(SwapMode.WAIT):
                raise ValueError("bad weights")
        engine.release()
        assert await engine.start(ASK) == engine.version

    play(scene)


def test_an_abort_ends_running_and_waiting_requests_and_ignores_unknown_ones() -> None:
    async def scene(engine: HandEngine) -> None:
        running = engine.start(ASK)
        await settle()
        late = replace(ASK)
        async with engine.gate.closed(SwapMode.KEEP):
            waiting = engine.start(late)
            await settle()
            await engine.gate.abort([ASK, late, replace(ASK)])
            assert (await running, await waiting) == (None, None)
        assert engine.stopped == [ASK]  # a request that never started is not known to the engine

    play(scene, stop=True)


def test_requests_wait_while_the_engine_sleeps_and_through_a_swap_that_ends_meanwhile() -> None:
    async def scene(engine: HandEngine) -> None:
        running = engine.start(HELD)
        await settle()
        await engine.gate.sleep()
        assert await running is None
        waiting = engine.start(ASK)
        await engine.swap(SwapMode.KEEP)
        await settle()
        assert engine.gate.running == []
        engine.gate.wake()
        engine.release()
        assert await waiting == WeightsVersion(0, 1, "")

    play(scene)


def test_a_dead_engine_ends_all_requests_and_refuses_everything_with_the_first_reason() -> None:
    async def scene(engine: HandEngine) -> None:
        running = engine.start(ASK)
        await settle()
        async with engine.gate.swap(), engine.gate.closed(SwapMode.KEEP):
            waiting = engine.start(replace(ASK))
            await settle()
            engine.gate.fail("it broke")
            engine.gate.fail("the engine is closed")
        for task in (running, waiting, engine.start(ASK)):
            with pytest.raises(EngineDead, match="it broke"):
                await task
        for act in (engine.swap(SwapMode.KEEP), engine.gate.sleep()):
            with pytest.raises(EngineDead, match="it broke"):
                await act

    play(scene)


def test_a_cancelled_request_is_gone_for_the_next_swap() -> None:
    async def scene(engine: HandEngine) -> None:
        running = engine.start(HELD)
        await settle()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await engine.swap(SwapMode.WAIT)

    play(scene)
