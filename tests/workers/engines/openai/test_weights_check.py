"""Servers that give other logprobs than the published weights should: none of their tokens are used."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollq.buffer.errors import RollqError
from rollq.buffer.values.rollouts import FinishReason
from rollq.buffer.weights.probe import Probe, probe_prompts
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.openai.engine import OpenAIEngine, OpenAISettings
from rollq.workers.engines.protocol import Request, Sampling, SwapMode, WeightsVersion
from rollq.workers.engines.weights_check import WeightsCheck, WeightsLate, WeightsRejected
from support.openai_server import CompletionsServer
from support.pauses import set_pauses
from support.waiting import PATIENCE_S

ASK = Request(np.array([40, 50], np.int32), Sampling(max_tokens=10, seed=7))
FIRST, SECOND, THIRD = (WeightsVersion(1, number, f"digest-{number}") for number in range(3))
RETRIES = 3
Two = tuple[CompletionsServer, CompletionsServer]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pauses(monkeypatch, first_s=0.01, longest_s=0.02)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({"norm": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def two() -> Iterator[Two]:
    with CompletionsServer() as one, CompletionsServer() as other:
        one.weight_routes = other.weight_routes = True
        yield one, other


def probe_of(logprob: float, dtype: str = "float32") -> Probe:
    prompts = probe_prompts(256)
    return Probe(dtype, prompts, [np.full(len(prompt) - 1, logprob, np.float32) for prompt in prompts])


RIGHT = probe_of(-0.5)
"""The probe of the weights that the servers hold, as long as a test leaves them as they are."""


def with_host(
    scenario: Callable[[EngineHost, OpenAIEngine], Awaitable[None]], *served: CompletionsServer, **options: Any
) -> None:
    """Run `scenario` over a host whose servers are all in."""

    async def run() -> None:
        engine = OpenAIEngine(OpenAISettings(urls=tuple(server.url for server in served), retries=RETRIES, **options))
        host = EngineHost(lambda: engine, restarts=0)
        await host.start()
        try:
            await until(engine, [True] * len(served))
            await scenario(host, engine)
        finally:
            await host.close()

    asyncio.run(run())


async def until(engine: OpenAIEngine, serving: list[bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while [server.serving for server in engine._servers.servers] != serving:
            await asyncio.sleep(0.005)


async def ask_five(host: EngineHost) -> None:
    for _ in range(5):
        assert len((await host.generate(replace(ASK))).ids) == 3


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("pushes", [True, False])
def test_a_server_with_other_logprobs_gets_no_requests_until_it_has_the_right_ones(
    two: Two, model: Path, caplog: pytest.LogCaptureFixture, pushes: bool
) -> None:
    """Servers into which nothing is pushed do not say their dtype."""
    one, other = two

    async def scenario(host: EngineHost, engine: OpenAIEngine) -> None:
        one.prompt_logprob = -0.7
        await host.swap(model, SECOND, SwapMode.WAIT, RIGHT)
        assert host.ready
        assert host.check == WeightsCheck(0.0, 1e-3 if pushes else 0.15)
        await ask_five(host)
        assert (len(one.bodies), len(other.bodies)) == (0, 5)
        [error] = errors(caplog)
        assert error.startswith(f"{one.url} gets no requests: its logprobs are not the logprobs of the live weights")
        one.prompt_logprob = -0.5
        await until(engine, [True, True])

    with_host(scenario, *two, **loading(model, pushes=pushes))


def loading(model: Path, *, pushes: bool) -> dict[str, Any]:
    return {"push_model": model} if pushes else {"server_follows": True}


@pytest.mark.parametrize("pushes", [True, False])
def test_weights_that_all_servers_serve_wrongly_are_rejected_and_the_next_ones_are_tried(
    two: Two, model: Path, pushes: bool
) -> None:
    async def scenario(host: EngineHost, engine: OpenAIEngine) -> None:
        await host.swap(model, FIRST, SwapMode.WAIT, RIGHT)
        await until(engine, [True, True])
        two[0].plan.append("stall")
        running = asyncio.create_task(host.generate(replace(ASK)))
        while sum(len(call.tokens.ids) for call in engine._gate.calls) < 2:
            await asyncio.sleep(0.005)
        with pytest.raises(
            WeightsRejected, match=r"no server serves the weights of version 1 correctly: .*1 nats apart"
        ):
            await host.swap(model, SECOND, SwapMode.ABORT, probe_of(-1.5))
        assert host.published.is_set() is False
        assert {span.version for span in (await running).versions} == {0}
        refused = await host.generate(replace(ASK))
        assert (len(refused.ids), refused.finish_reason) == (0, FinishReason.ABORT)
        await host.swap(model, FIRST, SwapMode.WAIT, RIGHT)
        assert host.ready
        await host.swap(model, THIRD, SwapMode.WAIT, RIGHT)
        assert {span.version for span in (await host.generate(replace(ASK))).versions} == {2}
        two[0].release()

    with_host(scenario, *two, **loading(model, pushes=pushes))


def test_servers_that_were_started_with_other_weights_than_those_published_are_rejected(two: Two, model: Path) -> None:
    async def scenario(host: EngineHost, engine: OpenAIEngine) -> None:
        with pytest.raises(WeightsRejected, match="version 0"):
            await host.swap(model, FIRST, SwapMode.WAIT, probe_of(-1.5))
        assert not host.ready

    with_host(scenario, *two)


def test_a_server_that_joins_late_is_checked(two: Two, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = two

    async def scenario(host: EngineHost, engine: OpenAIEngine) -> None:
        one.weight_plan.extend(["ok", "ok", *["500"] * 10_000])
        await host.swap(model, SECOND, SwapMode.WAIT, RIGHT)
        one.prompt_logprob = -0.6
        one.weight_plan.clear()
        await logged(caplog, f"{one.url} gets no requests: its logprobs are not the logprobs")
        await ask_five(host)
        assert (len(one.bodies), len(other.bodies)) == (0, 5)

    with_host(scenario, *two, push_model=model)


def test_servers_that_others_load_late_are_waited_for(two: Two, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(host: EngineHost, engine: OpenAIEngine) -> None:
        for server in two:
            server.prompt_logprob = -1.5
        for _ in range(3):
            with pytest.raises(WeightsLate, match="no server serves the weights of version 1 correctly"):
                await host.swap(model, SECOND, SwapMode.WAIT, RIGHT)
        assert len(errors(caplog)) == 2
        for server in two:
            server.prompt_logprob = -0.5
        await host.swap(model, SECOND, SwapMode.WAIT, RIGHT)
        await until(engine, [True, True])
        await ask_five(host)

    with_host(scenario, *two, server_follows=True)


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while text not in caplog.text:
            await asyncio.sleep(0.005)


def test_a_server_that_was_started_again_is_checked_before_its_next_request(two: Two, model: Path) -> None:
    one, other = two

    async def scenario(host: EngineHost, engine: OpenAIEngine) -> None:
        await host.swap(model, SECOND, SwapMode.WAIT, RIGHT)
        await until(engine, [True, True])
        one.weight_version, one.prompt_logprob = "default", -0.6
        await ask_five(host)
        assert (len(one.bodies), len(other.bodies)) == (0, 5)
        one.prompt_logprob = -0.5
        await until(engine, [True, True])

    with_host(scenario, *two, push_model=model)


def test_the_only_server_gives_no_tokens_while_it_gives_other_logprobs(two: Two, model: Path) -> None:
    async def scenario(host: EngineHost, engine: OpenAIEngine) -> None:
        await host.swap(model, SECOND, SwapMode.WAIT, RIGHT)
        two[0].weight_version, two[0].prompt_logprob = "default", -0.6
        with pytest.raises(RollqError, match="not the logprobs of the live weights"):
            await host.generate(replace(ASK))
        assert two[0].bodies == []
        two[0].prompt_logprob = -0.5
        await ask_five(host)

    with_host(scenario, two[0], push_model=model)


@pytest.mark.parametrize("probe", [RIGHT, None])
def test_a_server_that_gives_no_logprobs_of_prompts_serves_unchecked_and_is_named_once(
    two: Two, model: Path, caplog: pytest.LogCaptureFixture, probe: Probe | None
) -> None:
    async def scenario(host: EngineHost, engine: OpenAIEngine) -> None:
        for version in (FIRST, SECOND):
            await host.swap(model, version, SwapMode.WAIT, probe)
        assert host.ready
        assert host.check is None
        await ask_five(host)
        assert caplog.text.count("its weights are served unchecked") == 1

    two[0].prompt_logprob = None
    with_host(scenario, two[0], push_model=model)


def test_without_a_probe_servers_must_agree_with_the_first_one(two: Two, model: Path) -> None:
    one, other = two

    async def scenario(host: EngineHost, engine: OpenAIEngine) -> None:
        other.weight_plan.extend(["500"] * 10_000)  # `one` checks the folder, and is the first
        await host.swap(model, SECOND, SwapMode.WAIT)
        other.prompt_logprob = -0.6
        other.weight_plan.clear()
        await asyncio.sleep(0.1)
        await ask_five(host)
        assert (len(one.bodies), len(other.bodies)) == (5, 0)
        await asyncio.to_thread(one.stop)
        other.prompt_logprob = -0.5
        async with asyncio.timeout(PATIENCE_S):
            while not engine._servers.servers[1].serving:
                await asyncio.sleep(0.005)

    with_host(scenario, *two, push_model=model)


def test_without_a_probe_logprobs_must_be_finite(two: Two, model: Path) -> None:
    async def scenario(host: EngineHost, engine: OpenAIEngine) -> None:
        two[0].prompt_logprob = float("nan")
        with pytest.raises(WeightsRejected, match="inf nats apart"):
            await host.swap(model, SECOND, SwapMode.WAIT)

    with_host(scenario, two[0], push_model=model)


def test_a_server_that_refuses_the_prompts_of_the_probe_is_not_trusted(two: Two, model: Path) -> None:
    async def scenario(host: EngineHost, engine: OpenAIEngine) -> None:
        two[0].longest_prompt = 20
        with pytest.raises(WeightsRejected, match=r"its weights cannot be checked: .*too long"):
            await host.swap(model, SECOND, SwapMode.WAIT, RIGHT)

    with_host(scenario, two[0], push_model=model)


def test_the_dtype_of_a_server_says_how_far_it_may_be_off(two: Two, model: Path) -> None:
    async def scenario(host: EngineHost, engine: OpenAIEngine) -> None:
        for dtype, tolerance in (("float16", 0.05), (None, 0.15), ("fp8", 0.5)):
            two[0].dtype = dtype
            await host.swap(model, SECOND, SwapMode.WAIT, RIGHT)
            assert host.check == WeightsCheck(0.0, tolerance)

    with_host(scenario, two[0], push_model=model)
