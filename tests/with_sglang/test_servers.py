"""The engine over SGLang, on real servers that run on the CPU: `ROLLQ_SGLANG_PYTHON=... pytest tests/with_sglang`."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.values.rollouts import FinishReason, Int32Array
from rollq.consumer.weights.sources import probe_of
from rollq.workers.engines.protocol import Completion, Request, Sampling, SwapMode
from rollq.workers.engines.sglang.engine import SglangEngine, SglangSettings
from rollq.workers.engines.weights_check import WeightsRejected
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.engine_contract import *  # noqa: F403 - its tests run here
from support.engine_contract import World
from support.model_families import VOCABULARY
from support.pauses import set_pauses
from support.sglang_server import PYTHON, SglangServer
from support.vllm_run import TOLERANCE, check, free_port, make_qwen3, random_prompt, version
from support.vllm_server import until_it_answers, until_they_are

pytestmark = pytest.mark.skipif(PYTHON is None, reason="ROLLQ_SGLANG_PYTHON is not set")

Three = tuple[SglangServer, SglangServer, SglangServer]
MIXED = (
    Sampling(max_tokens=12, temperature=1.0),
    Sampling(max_tokens=7, temperature=0.5),
    Sampling(max_tokens=20, temperature=1.7),
    Sampling(max_tokens=9, temperature=1.0, top_k=5),
    Sampling(max_tokens=15, temperature=0.8, top_k=VOCABULARY, top_p=0.6),
    Sampling(max_tokens=9, temperature=0.7, top_k=1),
)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pauses(monkeypatch, first_s=0.1, longest_s=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three folders of one model with different weights."""
    return [make_qwen3(tmp_path_factory.mktemp(f"model-{seed}"), seed) for seed in range(3)]


@pytest.fixture(scope="module")
def servers(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    """Two of the first model, and one that stops at once."""
    stopping = make_qwen3(tmp_path_factory.mktemp("stopping"), 0, eos_token_id=list(range(VOCABULARY)))
    log = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        started = []
        for number, folder in enumerate((models[0], models[0], stopping)):
            started.append(stack.enter_context(SglangServer(folder, free_port(), log / str(number))))
        for server in started:
            server.wait()
        one, other, third = started
        yield one, other, third


@pytest.fixture(params=["pushed", "followed"])
def world(request: pytest.FixtureRequest, models: list[Path], servers: Three) -> World:
    one, _, third = servers
    more = {"push_model": models[0]} if request.param == "pushed" else {"server_follows": True}
    options, stopping = ({"urls": [server.url], **more} for server in (one, third))
    return World("sglang", options, models[0], stopping, tells_versions=request.param == "pushed")


def pushing(
    servers: Three, models: list[Path], scenario: Callable[[SglangEngine], Awaitable[None]], used: int = 2
) -> None:
    """Run `scenario` over an engine that pushes weights into the first `used` servers, at the version of models[0]."""

    async def run() -> None:
        urls = tuple(server.url for server in servers[:used])
        engine = SglangEngine(SglangSettings(urls=urls, push_model=models[0], start_timeout_s=120))
        await engine.start()
        try:
            await engine.swap(models[0], version(0), SwapMode.WAIT)
            await until_they_are(engine, [False] * used)
            await scenario(engine)
        finally:
            await engine.close()

    asyncio.run(run())


def test_logprobs_match_a_plain_forward(servers: Three, models: list[Path]) -> None:
    rng = np.random.default_rng(0)
    requests = [Request(random_prompt(rng, 3 + 17 * (i % 7)), MIXED[i % len(MIXED)]) for i in range(24)]
    seen: list[Completion] = []

    async def scenario(engine: SglangEngine) -> None:
        seen.extend(await asyncio.gather(*map(engine.generate, requests)))

    pushing(servers, models, scenario)
    for request, completion in zip(requests, seen, strict=True):
        assert len(completion.ids) > 0
        assert check(request, completion, models) < TOLERANCE


def test_sampling_that_gives_no_logprobs_of_its_own_is_refused(servers: Three, models: list[Path]) -> None:
    async def scenario(engine: SglangEngine) -> None:
        prompt = random_prompt(np.random.default_rng(0), 5)
        with pytest.raises(ValueError, match=r"refuses the request: HTTP 400.*requires top_k=1"):
            await engine.generate(Request(prompt, Sampling(max_tokens=3, top_p=0.5)))
        with pytest.raises(ValueError, match="does not support bad_words"):
            await engine.generate(Request(prompt, Sampling(max_tokens=3, bad_words=("a",))))
        biased = Sampling(max_tokens=3, logit_bias={"50": 100.0}, min_tokens=3, stop_token_ids=(7,), ignore_eos=True)
        assert (await engine.generate(Request(prompt, biased))).ids.tolist() == [50] * 3
        guided = await engine.generate(Request(prompt, Sampling(max_tokens=9, guided_regex="abc")))
        assert HfTokenizer(models[0]).decode(guided.ids.tolist()) == "abc"

    pushing(servers, models, scenario, used=1)


@pytest.mark.parametrize("mode", [SwapMode.WAIT, SwapMode.ABORT, SwapMode.KEEP])
def test_logprobs_match_the_weights_that_each_token_claims_across_swaps_under_load(
    servers: Three, models: list[Path], mode: SwapMode
) -> None:
    """Swaps continue until requests were seen to outlive one, or to be cut off by one."""
    rng = np.random.default_rng(1)
    prompts = [random_prompt(rng, 100) for _ in range(3)]
    seen: list[tuple[Request, Completion]] = []
    over = asyncio.Event()

    async def load(engine: SglangEngine, prompt: Int32Array) -> None:
        while not over.is_set():
            request = Request(prompt, Sampling(max_tokens=100, seed=int(rng.integers(1 << 60))))
            seen.append((request, await engine.generate(request)))

    async def scenario(engine: SglangEngine) -> None:
        loads = [asyncio.create_task(load(engine, prompt)) for prompt in prompts * 2]
        for number in count(1):
            made = len(seen)
            while len(seen) < made + 6:
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
    servers: Three, models: list[Path]
) -> None:
    """It is started with those of version 0, and version 1 is live."""
    one, *_ = servers
    rng = np.random.default_rng(2)
    requests = [Request(random_prompt(rng, 20), Sampling(max_tokens=200, seed=seed)) for seed in range(12)]
    seen: list[Completion] = []

    async def scenario(engine: SglangEngine) -> None:
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
    assert max(map(check, requests * 2, seen, [models] * 24)) < TOLERANCE


def test_weights_of_another_model_leave_the_old_ones_serving(
    servers: Three, models: list[Path], tmp_path: Path
) -> None:
    wider = make_qwen3(tmp_path / "wider", 0, hidden_size=96)
    request = Request(random_prompt(np.random.default_rng(5), 20), Sampling(max_tokens=20))

    async def scenario(engine: SglangEngine) -> None:
        for folder in (wider, tmp_path / "gone"):
            with pytest.raises(WeightsError, match=str(folder)):
                await engine.swap(folder, version(1), SwapMode.ABORT)
            completion = await engine.generate(request)
            assert completion.versions[0].version == 0
            assert check(request, completion, models) < TOLERANCE

    pushing(servers, models, scenario, used=1)


def test_a_server_with_the_models_own_logprobs_is_refused(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    with SglangServer(models[0], free_port(), tmp_path / "log") as server:
        server.wait()

        async def start() -> None:
            await SglangEngine(SglangSettings(urls=(server.url,))).start()

        with pytest.raises(ConfigError, match="start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"):
            asyncio.run(start())


def test_weights_with_an_old_layer_are_rejected_and_the_next_ones_serve(
    servers: Three, models: list[Path], tmp_path: Path
) -> None:
    old, new = (load_file(models[number] / "model.safetensors") for number in (0, 1))
    mixed = {name: old[name] if ".layers.1." in name else tensor for name, tensor in new.items()}
    save_file(mixed, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((models[0] / "config.json").read_bytes())
    probes = [probe_of(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)) for model in models]

    async def scenario(engine: SglangEngine) -> None:
        engine.expect(probes[1])
        with pytest.raises(WeightsRejected, match="no server serves the weights of version 1 correctly"):
            await engine.swap(tmp_path, version(1), SwapMode.ABORT)
        engine.expect(probes[2])
        await engine.swap(models[2], version(2), SwapMode.ABORT)
        assert engine.check is not None
        assert engine.check.difference < engine.check.tolerance / 10
        assert engine.check.tolerance == 1e-3, "the servers report their dtype"
        request = Request(random_prompt(np.random.default_rng(7), 20), Sampling(max_tokens=20))
        assert check(request, await engine.generate(request), models) < TOLERANCE

    pushing(servers, models, scenario)
