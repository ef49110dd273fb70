"""Several servers behind one engine: routing, conversations, and servers that come and go."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from rollq.buffer.errors import ConfigError
from rollq.workers.engines.openai.engine import OpenAIEngine, OpenAISettings
from rollq.workers.engines.protocol import Engine, EngineDead, Request, Sampling
from support.openai_server import CompletionsServer
from support.pauses import set_pauses
from support.waiting import PATIENCE_S

ASK = Request(np.array([40, 50], np.int32), Sampling(max_tokens=10, seed=7))
RETRIES = 3


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pauses(monkeypatch, first_s=0.01, longest_s=0.02)


@pytest.fixture
def two() -> Iterator[tuple[CompletionsServer, CompletionsServer]]:
    with CompletionsServer() as one, CompletionsServer() as other:
        yield one, other


async def started(*served: CompletionsServer) -> OpenAIEngine:
    """An engine over these servers, all of which are in."""
    engine = OpenAIEngine(OpenAISettings(urls=tuple(server.url for server in served), retries=RETRIES))
    await engine.start()
    await all_in(engine)
    return engine


async def all_in(engine: OpenAIEngine) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not all(server.serving for server in engine._servers.servers):
            await asyncio.sleep(0.005)


def outs(engine: OpenAIEngine) -> list[bool]:
    return [not server.serving for server in engine._servers.servers]


async def ask_many(engine: Engine, times: int) -> None:
    answers = await asyncio.gather(*(engine.generate(replace(ASK)) for _ in range(times)))
    assert all(len(answer.ids) == 3 for answer in answers)


def test_requests_go_to_the_server_with_the_least_to_do(two: tuple[CompletionsServer, CompletionsServer]) -> None:
    async def scene() -> None:
        engine = await started(*two)
        two[0].plan.append("hang")
        stuck = asyncio.create_task(engine.generate(replace(ASK)))
        await asyncio.to_thread(two[0].hanging.acquire)
        for _ in range(3):
            await engine.generate(replace(ASK))
        assert (len(two[0].bodies), len(two[1].bodies)) == (1, 3)
        two[0].release()
        await stuck
        await ask_many(engine, 20)
        assert (len(two[0].bodies), len(two[1].bodies)) == (11, 13)
        await engine.close()

    asyncio.run(scene())


def test_a_conversation_stays_with_its_server(two: tuple[CompletionsServer, CompletionsServer]) -> None:
    async def scene() -> None:
        engine = await started(*two)
        one, other = (replace(ASK, session=name) for name in ("one", "other"))
        await asyncio.gather(engine.generate(one), engine.generate(other))
        for _ in range(4):
            await engine.generate(one)
        assert sorted(len(server.bodies) for server in two) == [1, 5]
        keeper = max(two, key=lambda server: len(server.bodies))
        keeper.plan.append("503")
        await engine.generate(one)  # moves on when its server fails
        assert min(len(server.bodies) for server in two) == 2
        await engine.close()

    asyncio.run(scene())


@pytest.mark.parametrize("failure", ["503", "429", "drop", "garbage"])
def test_a_request_that_fails_is_asked_elsewhere_and_its_server_comes_back(
    two: tuple[CompletionsServer, CompletionsServer], failure: str
) -> None:
    async def scene() -> None:
        engine = await started(*two)
        two[0].plan.append(failure)
        two[0].probe_plan.extend(["503"] * 3)
        await engine.generate(replace(ASK))
        assert outs(engine) == [True, False]
        assert (len(two[0].bodies), len(two[1].bodies)) == (1, 1)
        await all_in(engine)
        await engine.generate(replace(ASK))
        assert len(two[0].bodies) == 2
        await engine.close()

    asyncio.run(scene())


def test_a_server_that_comes_back_with_other_weights_stays_out(
    two: tuple[CompletionsServer, CompletionsServer], caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        engine = await started(*two)
        two[0].fingerprint -= 0.2
        two[0].plan.append("drop")
        caplog.set_level("INFO")
        await ask_many(engine, 8)
        async with asyncio.timeout(PATIENCE_S):
            while "serves other weights" not in caplog.text:
                await asyncio.sleep(0.005)
        assert outs(engine) == [True, False]
        two[0].fingerprint += 0.2
        await all_in(engine)
        await engine.close()

    asyncio.run(scene())


def test_a_server_with_other_weights_does_not_keep_an_engine_alive(
    two: tuple[CompletionsServer, CompletionsServer],
) -> None:
    async def scene() -> None:
        engine = await started(*two)
        two[0].fingerprint -= 0.2
        two[0].plan.append("drop")
        await ask_many(engine, 8)
        await asyncio.to_thread(two[1].stop)
        with pytest.raises(EngineDead, match="the simplest request failed too"):
            await engine.generate(replace(ASK))
        await engine.close()

    asyncio.run(scene())


def test_nothing_is_lost_when_a_server_goes_away_under_load_and_all_end_with_the_last() -> None:
    async def scene(stack: ExitStack) -> None:
        one, other = (stack.enter_context(CompletionsServer()) for _ in range(2))
        engine = await started(one, other)
        one.plan.extend(["hang"] * 10)
        running = [asyncio.create_task(engine.generate(replace(ASK))) for _ in range(20)]
        for _ in range(10):
            await asyncio.to_thread(one.hanging.acquire)
        await asyncio.to_thread(one.stop)
        for answer in await asyncio.gather(*running):
            assert len(answer.ids) == 3
        assert outs(engine) == [True, False]
        await asyncio.to_thread(other.stop)
        with pytest.raises(EngineDead, match="the simplest request failed too"):
            await engine.generate(replace(ASK))
        await engine.close()

    with ExitStack() as stack:
        asyncio.run(scene(stack))


def test_an_engine_starts_with_the_servers_that_are_ready() -> None:
    async def scene(served: CompletionsServer, gone: str) -> None:
        engine = OpenAIEngine(OpenAISettings(urls=(gone, served.url), retries=RETRIES))
        await engine.start()
        await ask_many(engine, 4)
        assert outs(engine) == [True, False]
        await engine.close()

    with CompletionsServer() as served:
        with CompletionsServer() as gone:
            url = gone.url
        asyncio.run(scene(served, url))


def test_servers_that_cannot_serve_training_are_told_at_the_start(
    two: tuple[CompletionsServer, CompletionsServer],
) -> None:
    for server in two:
        server.probe_plan.append("no ids")
    with pytest.raises(ConfigError, match="token_ids"):
        asyncio.run(started(*two))
