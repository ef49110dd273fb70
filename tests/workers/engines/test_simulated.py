"""Tests of the simulated engine's time. Nothing waits: the event loop's clock stands still until a test moves it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollq.buffer.values.rollouts import FinishReason
from rollq.workers.engines.protocol import Completion, Request, Sampling, SwapMode, WeightsVersion
from rollq.workers.engines.simulated import SimulatedEngine, SimulatedSettings

FIRST, SECOND = WeightsVersion(1, 0, "a"), WeightsVersion(1, 1, "b")


@pytest.fixture(autouse=True)
def _long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollq.workers.engines.simulated.CONTEXT_TOKENS", 10_000_000)


class Clock:
    """An engine, its requests in the order of their start, and the time."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.now_s = 1000.0
        self.ended: list[tuple[str, float]] = []
        """Requests that ended, and when."""
        self.running: dict[str, asyncio.Task[Completion]] = {}
        self.requests: dict[str, Request] = {}
        asyncio.get_running_loop().time = lambda: self.now_s  # type: ignore[method-assign]

    async def ask(self, name: str, tokens: int, **more: Any) -> None:
        self.requests[name] = Request(np.array([1], np.int32), Sampling(max_tokens=tokens), **more)
        self.running[name] = asyncio.create_task(self.engine.generate(self.requests[name]))
        self.running[name].add_done_callback(lambda _: self.ended.append((name, round(self.now_s - 1000, 3))))
        await self.settle()

    async def pass_time(self, seconds: float, step_s: float = 0.125) -> None:
        """Move the time by steps, and let everything that is due happen at each."""
        for _ in range(round(seconds / step_s)):
            self.now_s += step_s
            await self.settle()

    async def settle(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)


def with_clock(scenario: Callable[[Clock], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        engine = SimulatedEngine(SimulatedSettings(lengths=(1_000_000,), **options))
        await engine.start()
        await engine.swap(Path(), FIRST, SwapMode.WAIT)
        clock = Clock(engine)
        await scenario(clock)
        await engine.close()
        await asyncio.gather(*clock.running.values(), return_exceptions=True)

    asyncio.run(run())


def test_sequences_run_at_their_own_speed_until_there_are_more_than_share_the_speed_of_all() -> None:
    async def scenario(clock: Clock) -> None:
        for number in range(2):
            await clock.ask(f"one of two {number}", 8)
        await clock.pass_time(2)
        for number in range(8):
            await clock.ask(f"one of eight {number}", 8)
        await clock.pass_time(8)
        assert [at_s for _, at_s in clock.ended] == [1.0] * 2 + [6.0] * 8

    with_clock(scenario, tokens_per_s=8.0, most_tokens_per_s=16.0)


def test_without_a_speed_of_all_no_sequence_slows_another() -> None:
    async def scenario(clock: Clock) -> None:
        for number in range(100):
            await clock.ask(str(number), 8)
        await clock.pass_time(2)
        assert {at_s for _, at_s in clock.ended} == {1.0}

    with_clock(scenario, tokens_per_s=8.0)


def test_a_sequence_that_ends_or_is_stopped_makes_the_others_faster_and_one_that_comes_slower() -> None:
    async def scenario(clock: Clock) -> None:
        await clock.ask("long", 32)
        await clock.ask("short", 4)
        await clock.ask("stopped", 1000)
        await clock.ask("other", 1000)
        await clock.pass_time(1)  # two tokens each
        await clock.engine.abort([clock.requests["stopped"], clock.requests["other"]])
        assert [len((await clock.running[name]).ids) for name in ("stopped", "other")] == [2, 2]
        await clock.pass_time(0.5)  # four tokens each
        await clock.pass_time(2.5)  # the long one alone: 10 more
        await clock.ask("late", 8)
        await clock.pass_time(6)  # 8 more in 2 s, then 12 in 3 s
        assert clock.ended[2:] == [("short", 1.5), ("late", 6.0), ("long", 8.5)]

    with_clock(scenario, tokens_per_s=4.0, most_tokens_per_s=8.0)


@pytest.mark.parametrize("step_s", [0.125, 4.0])
def test_what_a_sequence_has_made_does_not_depend_on_when_the_event_loop_looks(step_s: float) -> None:
    async def scenario(clock: Clock) -> None:
        await clock.ask("short", 4)
        await clock.ask("long", 1000)
        await clock.pass_time(4, step_s)  # 4 tokens each in 1 s, then 24 more
        await clock.engine.abort([clock.requests["long"]])
        assert len((await clock.running["long"]).ids) == 28
        assert (await clock.running["short"]).finish_reason is FinishReason.LENGTH

    with_clock(scenario, tokens_per_s=8.0, most_tokens_per_s=8.0)


def test_no_more_than_max_sequences_run_and_the_others_wait_by_priority_and_arrival() -> None:
    async def scenario(clock: Clock) -> None:
        assert clock.engine.max_sequences == 2
        for name, priority in (("a", 0), ("b", 0), ("later", 5), ("c", 1), ("d", 1), ("soon", -1), ("gone", -2)):
            await clock.ask(name, 8, priority=priority)
        await clock.engine.abort([clock.requests["gone"]])
        assert len((await clock.running["gone"]).ids) == 0
        await clock.pass_time(4)
        assert clock.ended == [
            ("gone", 0.0),
            *((name, 1.0) for name in "ab"),
            *((name, 2.0) for name in ("soon", "c")),
            *((name, 3.0) for name in ("d", "later")),
        ]

    with_clock(scenario, tokens_per_s=8.0, most_tokens_per_s=16.0, max_sequences=2)


def test_a_place_is_given_to_no_request_while_a_swap_waits_for_those_that_run() -> None:
    async def scenario(clock: Clock) -> None:
        await clock.ask("short", 8)
        await clock.ask("long", 16)
        await clock.ask("next", 8)
        swap = asyncio.create_task(clock.engine.swap(Path(), SECOND, SwapMode.WAIT))
        await clock.pass_time(4)
        await swap
        assert clock.ended == [("short", 1.0), ("long", 2.0), ("next", 3.0)]
        assert [span.version for span in (await clock.running["next"]).versions] == [1]

    with_clock(scenario, tokens_per_s=8.0, max_sequences=2)


def test_versions_follow_the_tokens_made_before_a_swap_that_keeps() -> None:
    async def scenario(clock: Clock) -> None:
        for name in ("a", "b", "c", "d"):
            await clock.ask(name, 16)
        await clock.pass_time(2)  # at half the speed: 8 tokens
        await clock.engine.swap(Path(), SECOND, SwapMode.KEEP)
        await clock.pass_time(4)
        for running in clock.running.values():
            assert [(span.version, span.tokens) for span in (await running).versions] == [(0, 8), (1, 8)]

    with_clock(scenario, tokens_per_s=8.0, most_tokens_per_s=16.0)


def test_thousands_of_sequences_start_report_and_end() -> None:
    async def scenario(clock: Clock) -> None:
        reports: list[int] = []
        requests = [
            Request(
                np.array([1], np.int32),
                Sampling(max_tokens=200 + number % 100),
                report=lambda made: reports.append(len(made.ids)),
            )
            for number in range(5000)
        ]
        running = asyncio.gather(*(clock.engine.generate(request) for request in requests))
        await clock.settle()
        await clock.pass_time(5000 * 300 / 100_000, 1.0)
        await clock.settle()
        assert sum(len(completion.ids) for completion in await running) == sum(
            request.sampling.max_tokens for request in requests
        )
        assert reports.count(128) == 5000
        assert reports.count(256) == 50 * 43

    with_clock(scenario, tokens_per_s=1000.0, most_tokens_per_s=100_000.0, max_sequences=4000)
