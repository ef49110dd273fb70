"""What `Engine` promises. A test module of each engine imports these tests and brings the fixture `world`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollq.buffer.values.rollouts import FinishReason, VersionSpan
from rollq.workers.engines.protocol import (
    REPORT_TOKENS,
    Completion,
    Engine,
    EngineDead,
    Request,
    Sampling,
    SwapMode,
    WeightsVersion,
)
from rollq.workers.engines.registry import make_engine

PROMPT = np.array([40, 50, 60], dtype=np.int32)
LONG_TOKENS = 300
# Greedy: the untrained model repeats its last token, so only the limit ends it.
LONG = Request(PROMPT, Sampling(max_tokens=LONG_TOKENS, top_k=1))
# It still runs when a busy test comes to look, also where a server is ahead of its client; the context ends it.
ENDLESS = Request(PROMPT, Sampling(max_tokens=1_000_000, top_k=1))
FIRST = WeightsVersion(1, 0, "a")
Scenario = Callable[[Engine], Awaitable[None]]
CLOCK = Request(PROMPT, Sampling(max_tokens=5, top_k=1))


@dataclass(frozen=True)
class World:
    """One engine and what it needs: `weights` to swap to, `stopping` options under which sequences end with EOS."""

    name: str
    options: Mapping[str, Any]
    weights: Path
    stopping: Mapping[str, Any]
    tells_versions: bool = True
    """Whether the engine knows which weights made which token of a request that outlived a swap."""

    @property
    def mode(self) -> SwapMode:
        """How to swap under a running request."""
        return SwapMode.KEEP if self.tells_versions else SwapMode.WAIT

    def run(self, scenario: Scenario, options: Mapping[str, Any]) -> None:
        """Run `scenario` over an engine that serves `weights` as version (1, 0)."""

        async def with_new_engine() -> None:
            engine = make_engine(self.name, options)
            await engine.start()
            try:
                await engine.swap(self.weights, FIRST, SwapMode.WAIT)
                await scenario(engine)
            finally:
                await engine.close()

        asyncio.run(with_new_engine())


def with_engine(world: World, scenario: Scenario, options: Mapping[str, Any] | None = None) -> None:
    """Run `scenario` in `world`."""
    world.run(scenario, world.options if options is None else options)


async def let_them_run(engine: Engine) -> None:
    """Until requests made before have tokens. Behind HTTP, one short answer may overtake the first token of another."""
    for _ in range(3):
        await engine.generate(CLOCK)


def check_lengths(completion: Completion) -> None:
    assert completion.ids.dtype == np.int32
    assert completion.logprobs.dtype == np.float32
    assert len(completion.ids) == len(completion.logprobs) == sum(span.tokens for span in completion.versions)
    assert np.isfinite(completion.logprobs).all()
    assert (completion.logprobs <= 0).all()


def test_a_completion_has_a_logprob_and_a_version_for_every_token(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        for completion in await asyncio.gather(*(engine.generate(CLOCK) for _ in range(20))):
            check_lengths(completion)
            assert len(completion.ids) == 5
            assert completion.versions == (VersionSpan(1, 0, 5),)
            assert completion.finish_reason is FinishReason.LENGTH

    with_engine(world, scenario)


def test_a_sequence_that_stops_contains_its_last_token(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        completion = await engine.generate(LONG)
        check_lengths(completion)
        assert completion.finish_reason is FinishReason.STOP
        assert 1 <= len(completion.ids) <= 3

    with_engine(world, scenario, world.stopping)


def test_a_prefix_is_continued_and_only_new_tokens_come_back(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        completion = await engine.generate(replace(CLOCK, prefix_ids=np.array([70, 71], dtype=np.int32)))
        check_lengths(completion)
        assert len(completion.ids) == 5

    with_engine(world, scenario)


def test_priorities_are_accepted(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        requests = [replace(CLOCK, priority=priority) for priority in (3, -1, 2)]
        assert [len(one.ids) for one in await asyncio.gather(*map(engine.generate, requests))] == [5, 5, 5]

    with_engine(world, scenario)


def test_a_swap_that_aborts_returns_partial_tokens_of_the_old_version(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        running = [asyncio.create_task(engine.generate(ENDLESS)) for _ in range(4)]
        await let_them_run(engine)
        await engine.swap(world.weights, WeightsVersion(1, 1, "b"), SwapMode.ABORT)
        for completion in await asyncio.gather(*running):
            check_lengths(completion)
            assert completion.finish_reason is FinishReason.ABORT
            assert len(completion.ids) >= 1
            assert {span.version for span in completion.versions} == {0}
        assert (await engine.generate(CLOCK)).versions == (VersionSpan(1, 1, 5),)
        assert engine.version == WeightsVersion(1, 1, "b")

    with_engine(world, scenario)


def test_a_swap_that_keeps_gives_later_tokens_the_new_version(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        requests = [replace(ENDLESS) for _ in range(3)]
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        ends = asyncio.create_task(engine.generate(LONG))
        await let_them_run(engine)
        await engine.swap(world.weights, WeightsVersion(2, 0, "b"), SwapMode.KEEP)
        await let_them_run(engine)
        await engine.abort(requests)
        for completion in await asyncio.gather(*running):
            check_lengths(completion)
            seen = [(span.epoch, span.version) for span in completion.versions]
            assert seen == ([(1, 0), (2, 0)] if world.tells_versions else [(1, 0)])
        check_lengths(await ends)
        assert ((await ends).finish_reason, len((await ends).ids)) == (FinishReason.LENGTH, LONG_TOKENS)

    with_engine(world, scenario)


def test_a_swap_that_waits_lets_running_requests_finish_and_holds_new_ones(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        running = [asyncio.create_task(engine.generate(LONG)) for _ in range(4)]
        await engine.generate(CLOCK)
        swap = asyncio.create_task(engine.swap(world.weights, WeightsVersion(1, 1, "b"), SwapMode.WAIT))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(CLOCK))
        for completion in await asyncio.gather(*running):
            assert completion.versions == (VersionSpan(1, 0, LONG_TOKENS),)
        await swap
        check_lengths(await late)
        assert (await late).finish_reason is FinishReason.LENGTH
        assert (await engine.generate(CLOCK)).versions == (VersionSpan(1, 1, 5),)

    with_engine(world, scenario)


def test_swaps_that_meet_are_made_one_after_the_other(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        running = asyncio.create_task(engine.generate(LONG))
        await engine.generate(CLOCK)
        versions = [WeightsVersion(1, number, "x") for number in (1, 2, 3)]
        await asyncio.gather(*(engine.swap(world.weights, version, SwapMode.KEEP) for version in versions))
        assert engine.version == versions[-1]
        check_lengths(await running)

    with_engine(world, scenario)


def test_cancelling_a_request_frees_it_and_nothing_else(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        doomed = asyncio.create_task(engine.generate(ENDLESS))
        sibling = asyncio.create_task(engine.generate(LONG))
        await engine.generate(CLOCK)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert len((await sibling).ids) == LONG_TOKENS
        # A swap that waits for running requests would hang on one that is not freed.
        await engine.swap(world.weights, WeightsVersion(1, 1, "b"), SwapMode.WAIT)

    with_engine(world, scenario)


def test_a_cancelled_swap_leaves_an_engine_that_serves_and_swaps(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        running = asyncio.create_task(engine.generate(ENDLESS))
        await engine.generate(CLOCK)
        swap = asyncio.create_task(engine.swap(world.weights, WeightsVersion(1, 1, "b"), SwapMode.WAIT))
        await asyncio.sleep(0.02)
        swap.cancel()
        with pytest.raises(asyncio.CancelledError):
            await swap
        check_lengths(await engine.generate(CLOCK))
        await engine.swap(world.weights, WeightsVersion(1, 2, "c"), SwapMode.KEEP)
        assert engine.version.version == 2
        await engine.abort([ENDLESS])
        check_lengths(await running)

    with_engine(world, scenario)


def test_a_closed_engine_is_dead_for_running_and_new_requests(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        running = asyncio.create_task(engine.generate(ENDLESS))
        await engine.generate(CLOCK)
        await engine.close()
        with pytest.raises(EngineDead):
            await running
        with pytest.raises(EngineDead):
            await engine.generate(CLOCK)
        with pytest.raises(EngineDead):
            await engine.swap(world.weights, WeightsVersion(1, 1, "b"), SwapMode.WAIT)

    with_engine(world, scenario)


def test_an_engine_that_was_never_started_closes(world: World) -> None:
    async def scenario() -> None:
        engine = make_engine(world.name, world.options)
        await engine.close()
        with pytest.raises(EngineDead):
            await engine.generate(CLOCK)

    asyncio.run(scenario())


def test_a_request_that_can_never_work_is_refused(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(ValueError, match="context"):
            await engine.generate(replace(CLOCK, prompt_ids=np.full(200_000, 7, dtype=np.int32)))
        with pytest.raises(ValueError, match="empty"):
            await engine.generate(replace(CLOCK, prompt_ids=np.array([], dtype=np.int32)))

    with_engine(world, scenario)


@pytest.mark.parametrize("mode", [SwapMode.ABORT, SwapMode.KEEP])
def test_xp13_a_swap_of_any_mode_waits_for_a_request_that_must_finish(world: World, mode: SwapMode) -> None:
    async def scenario(engine: Engine) -> None:
        long = asyncio.create_task(engine.generate(replace(LONG, must_finish=True)))
        other = asyncio.create_task(engine.generate(ENDLESS if mode is SwapMode.ABORT else LONG))
        await engine.generate(CLOCK)
        await engine.swap(world.weights, WeightsVersion(1, 1, "b"), mode)
        completion = await long
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.versions == (VersionSpan(1, 0, LONG_TOKENS),)
        check_lengths(await other)
        assert (await other).finish_reason is (FinishReason.ABORT if mode is SwapMode.ABORT else FinishReason.LENGTH)
        assert (await engine.generate(CLOCK)).versions == (VersionSpan(1, 1, 5),)

    with_engine(world, scenario)


def test_an_abort_ends_the_requests_that_it_names_with_what_they_have(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        named, sibling = replace(ENDLESS, must_finish=True), LONG
        ended, goes_on = (asyncio.create_task(engine.generate(request)) for request in (named, sibling))
        await let_them_run(engine)
        await engine.abort([named, CLOCK])
        completion = await ended
        check_lengths(completion)
        assert completion.finish_reason is FinishReason.ABORT
        assert len(completion.ids) >= 1
        assert (await goes_on).finish_reason is FinishReason.LENGTH

    with_engine(world, scenario)


def test_a_sleeping_engine_holds_requests_until_it_is_woken_and_then_takes_new_weights(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        running = asyncio.create_task(engine.generate(ENDLESS))
        await engine.generate(CLOCK)
        await engine.sleep()
        assert (await running).finish_reason is FinishReason.ABORT
        waiting, named = asyncio.create_task(engine.generate(replace(CLOCK))), replace(CLOCK)
        dropped = asyncio.create_task(engine.generate(named))
        await asyncio.sleep(0)
        await engine.abort([named])
        completion = await dropped
        assert (completion.finish_reason, len(completion.ids), completion.versions) == (FinishReason.ABORT, 0, ())
        assert not waiting.done()
        await engine.wake()
        assert (await waiting).versions == (VersionSpan(1, 0, 5),)
        await engine.swap(world.weights, WeightsVersion(1, 1, "b"), SwapMode.WAIT)
        assert (await engine.generate(CLOCK)).versions == (VersionSpan(1, 1, 5),)

    with_engine(world, scenario)


def test_a_running_request_reports_its_tokens(world: World) -> None:
    async def scenario(engine: Engine) -> None:
        said: list[Completion] = []
        request = replace(LONG, sampling=replace(LONG.sampling, max_tokens=1000), report=said.append)
        running = asyncio.ensure_future(engine.generate(request))
        while not said:
            await asyncio.sleep(0.001)
        await engine.swap(world.weights, WeightsVersion(1, 1, "b"), world.mode)
        completion = await running
        lengths = [0, *(len(report.ids) for report in said), len(completion.ids)]
        assert all(REPORT_TOKENS <= after - before < 2 * REPORT_TOKENS for before, after in pairwise(lengths[:-1]))
        assert lengths[-1] - lengths[-2] < 2 * REPORT_TOKENS
        for report in said:
            check_lengths(report)
            tokens = len(report.ids)
            assert report.ids.tolist() == completion.ids[:tokens].tolist()
            assert report.logprobs.tolist() == completion.logprobs[:tokens].tolist()
            assert versions_of(report) == versions_of(completion)[:tokens]

    with_engine(world, scenario)


def versions_of(completion: Completion) -> list[int]:
    """The version of each token."""
    return [span.version for span in completion.versions for _ in range(span.tokens)]
