"""Weights that the engine behind HTTP loads into real vLLM servers itself."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollq.buffer.errors import WeightsError
from rollq.buffer.values.rollouts import FinishReason, Int32Array
from rollq.consumer.weights.sources import probe_of
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.openai.engine import OpenAIEngine, OpenAISettings
from rollq.workers.engines.protocol import Completion, Request, Sampling, SwapMode
from rollq.workers.engines.weights_check import WeightsRejected
from support.engine_contract import *  # noqa: F403 - its tests run here
from support.engine_contract import World
from support.pauses import set_pauses
from support.vllm_run import TOLERANCE, check, make_qwen3, random_prompt, version
from support.vllm_server import VllmServer, until_it_answers, until_they_are

pytest_plugins = "support.vllm_fixtures"

Pair = tuple[VllmServer, VllmServer, VllmServer]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pauses(monkeypatch, first_s=0.1, longest_s=1)


def pushing(
    servers: Pair, models: list[Path], scenario: Callable[[OpenAIEngine], Awaitable[None]], used: int = 2
) -> None:
    """Run `scenario` over an engine that pushes weights into the first `used` servers, at the version of models[0]."""

    async def run() -> None:
        urls = tuple(server.url for server in servers[:used])
        settings = OpenAISettings(urls=urls, push_model=models[0])
        engine = OpenAIEngine(settings)
        await engine.start()
        try:
            await engine.swap(models[0], version(0), SwapMode.WAIT)
            await until_they_are(engine, [False] * used)
            await scenario(engine)
        finally:
            await engine.close()

    asyncio.run(run())


@pytest.fixture(scope="module", autouse=True)
def given_back(servers: Pair, models: list[Path]) -> Iterator[None]:
    """Other tests want the servers as they were started."""

    async def nothing(engine: OpenAIEngine) -> None:
        return None

    yield
    pushing(servers, models, nothing, used=3)


@pytest.fixture
def world(models: list[Path], servers: Pair) -> World:
    one, _, third = ({"urls": [server.url], "push_model": models[0]} for server in servers)
    return World("openai", one, models[0], third)


@pytest.mark.parametrize("mode", [SwapMode.WAIT, SwapMode.ABORT, SwapMode.KEEP])
def test_logprobs_match_the_weights_that_each_token_claims_across_swaps_under_load(
    servers: Pair, models: list[Path], mode: SwapMode
) -> None:
    """Swaps go on until requests were seen to outlive one, or to be cut off by one."""
    rng = np.random.default_rng(1)
    prompts = [random_prompt(rng, 300) for _ in range(4)]
    seen: list[tuple[Request, Completion]] = []
    over = asyncio.Event()

    async def load(engine: OpenAIEngine, prompt: Int32Array) -> None:
        while not over.is_set():
            request = Request(prompt, Sampling(max_tokens=300, seed=int(rng.integers(1 << 60))))
            seen.append((request, await engine.generate(request)))

    async def scenario(engine: OpenAIEngine) -> None:
        loads = [asyncio.create_task(load(engine, prompt)) for prompt in prompts * 2]
        for number in count(1):
            made = len(seen)
            while len(seen) < made + 8:
                await asyncio.sleep(0.01)
            assert await engine.swap(models[number % 3], version(number), mode) > 0
            if number >= 3 and (mode is SwapMode.WAIT or outlived() or cut_off()):
                break
        over.set()
        await asyncio.gather(*loads)

    def outlived() -> int:
        return sum(len(completion.versions) > 1 for _, completion in seen)

    def cut_off() -> int:
        return sum(completion.finish_reason is FinishReason.ABORT for _, completion in seen)

    pushing(servers, models, scenario)
    assert (outlived() > 0, cut_off() > 0) == (mode is SwapMode.KEEP, mode is SwapMode.ABORT)
    last = max(span.version for _, completion in seen for span in completion.versions)
    folders = [models[number % 3] for number in range(last + 1)]
    assert last >= 3
    assert max(check(request, completion, folders) for request, completion in seen if len(completion.ids)) < TOLERANCE


def test_a_server_that_was_killed_comes_back_with_the_weights_that_are_wanted(
    servers: Pair, models: list[Path]
) -> None:
    """It is started with those of version 0, and version 1 is live."""
    one, *_ = servers
    rng = np.random.default_rng(2)
    requests = [Request(random_prompt(rng, 20), Sampling(max_tokens=600, seed=seed)) for seed in range(24)]
    seen: list[Completion] = []

    async def scenario(engine: OpenAIEngine) -> None:
        await engine.swap(models[1], version(1), SwapMode.WAIT)
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0)
        await until_it_answers(engine, one)
        one.kill()
        one.start()
        seen.extend(await asyncio.gather(*running))
        await asyncio.to_thread(one.wait)
        await until_they_are(engine, [False, False])
        seen.extend(await asyncio.gather(*map(engine.generate, requests)))

    pushing(servers, models, scenario)
    assert {span.version for completion in seen for span in completion.versions} == {1}
    assert max(map(check, requests * 2, seen, [models] * 48)) < TOLERANCE


def test_a_server_whose_weights_were_changed_meanwhile_gets_its_own_before_the_next_request(
    servers: Pair, models: list[Path]
) -> None:
    request = Request(random_prompt(np.random.default_rng(3), 20), Sampling(max_tokens=50, seed=1))
    seen: list[Completion] = []

    async def change() -> None:
        other = OpenAIEngine(OpenAISettings(urls=(servers[0].url,), push_model=models[0]))
        await other.start()
        await other.swap(models[1], version(1), SwapMode.WAIT)
        seen.append(await other.generate(request))
        await other.close()

    async def scenario(engine: OpenAIEngine) -> None:
        await engine.swap(models[2], version(2), SwapMode.WAIT)
        seen.append(await engine.generate(request))
        await change()
        seen.append(await engine.generate(request))

    pushing(servers, models, scenario, used=1)
    assert max(check(request, completion, models) for completion in seen) < TOLERANCE
    assert [completion.versions[0].version for completion in seen] == [2, 1, 2]


def test_weights_with_an_old_layer_are_rejected_before_a_group_is_leased_and_the_next_ones_serve(
    servers: Pair, models: list[Path], tmp_path: Path
) -> None:
    old, new = (load_file(models[number] / "model.safetensors") for number in (0, 1))
    mixed = {name: old[name] if ".layers.1." in name else tensor for name, tensor in new.items()}
    save_file(mixed, tmp_path / "model.safetensors", {"format": "pt"})
    probes = [probe_of(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)) for model in models]
    requests = [Request(random_prompt(np.random.default_rng(6), 20), Sampling(max_tokens=600)) for _ in range(4)]
    ready: list[bool] = []

    async def run() -> list[Completion]:
        urls = tuple(server.url for server in servers[:2])
        settings = OpenAISettings(urls=urls, push_model=models[0])
        engine = OpenAIEngine(settings)
        host = EngineHost(lambda: engine, restarts=0)
        await host.start()
        try:
            await host.swap(models[0], version(0), SwapMode.WAIT, probes[0])
            running = [asyncio.create_task(host.generate(request)) for request in requests]
            while not any(call.tokens.ids for call in engine._gate.calls):
                await asyncio.sleep(0.001)
            with pytest.raises(WeightsRejected, match="no server serves the weights of version 1 correctly"):
                await host.swap(tmp_path, version(1), SwapMode.KEEP, probes[1])
            ready.append(host.ready)
            await host.swap(models[2], version(2), SwapMode.ABORT, probes[2])
            ready.append(host.ready)
            assert host.check is not None
            assert host.check.difference < host.check.tolerance / 10
            assert host.check.tolerance == 1e-3, "the servers report their dtype"
            again = [host.generate(Request(one.prompt_ids, Sampling(max_tokens=20))) for one in requests]
            return [*await asyncio.gather(*running), *await asyncio.gather(*again)]
        finally:
            await host.close()

    completions = asyncio.run(run())
    assert ready == [False, True]
    assert {span.version for completion in completions for span in completion.versions} == {0, 2}
    assert max(map(check, requests * 2, completions, [models] * 8)) < TOLERANCE


def test_weights_that_are_not_the_models_or_not_there_leave_the_old_ones_serving(
    servers: Pair, models: list[Path], tmp_path: Path
) -> None:
    wider = make_qwen3(tmp_path / "wider", 0, hidden_size=96)
    cut = make_qwen3(tmp_path / "cut", 0)
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    request = Request(random_prompt(np.random.default_rng(5), 20), Sampling(max_tokens=20))

    async def scenario(engine: OpenAIEngine) -> None:
        for folder in (wider, cut, tmp_path / "gone"):
            with pytest.raises(WeightsError, match=str(folder)):
                await engine.swap(folder, version(1), SwapMode.ABORT)
            completion = await engine.generate(request)
            assert completion.versions[0].version == 0
            assert check(request, completion, models) < TOLERANCE

    pushing(servers, models, scenario)
