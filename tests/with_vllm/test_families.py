"""Models of many families in vLLM: their logprobs are right after every swap, or they are refused.

`ROLLQ_FAMILIES=all` tests all families, a few minutes each on a busy machine; by default three that were wrong once.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollq.buffer.errors import ConfigError
from rollq.consumer.weights.sources import probe_of
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.openai.engine import OpenAIEngine, OpenAISettings
from rollq.workers.engines.protocol import Request, Sampling, SwapMode
from rollq.workers.engines.weights_check import WeightsRejected
from support.adapters import lora, merged
from support.model_families import FAMILIES, make_model
from support.vllm_run import TOLERANCE, check, free_port, options, random_prompt, version, with_host
from support.vllm_server import VllmServer

RESTARTED = {"gpt_oss"}
"""vLLM cannot reload these."""
EXPERTS = {"gpt_oss", "mixtral", "olmoe", "qwen3_moe"}
"""vLLM needs a GPU for adapters on these."""
ONCE_WRONG = ("gemma2", "gpt_oss", "qwen3_moe")
ALL = os.environ.get("ROLLQ_FAMILIES") == "all"
TESTED = tuple(FAMILIES) if ALL else ONCE_WRONG
SWAPS = ((0, SwapMode.ABORT), (1, SwapMode.ABORT), (2, SwapMode.KEEP), (1, SwapMode.WAIT))
RESTART = ((1, SwapMode.RESTART),)
CONTEXT_TOKENS = 1024


def probe_in(folder: Path) -> Any:
    return probe_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager"))


async def worst_error(engine: EngineHost | OpenAIEngine, folders: list[Path]) -> float:
    """The largest error of a logprob in a few answers."""
    rng = np.random.default_rng(0)
    requests = [Request(random_prompt(rng, length), Sampling(max_tokens=40)) for length in (5, 50, 200)]
    made = await asyncio.gather(*map(engine.generate, requests))
    return max(check(request, one, folders) for request, one in zip(requests, made, strict=True))


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "qwen3_moe" else pytest.mark.slow) for name in TESTED]
)
def test_every_token_has_the_logprob_of_the_weights_that_it_claims(family: str, tmp_path: Path) -> None:
    folders = [make_model(tmp_path / str(seed), family, seed) for seed in range(3)]
    probes = list(map(probe_in, folders))

    async def scenario(host: EngineHost) -> None:
        if family in RESTARTED:
            with pytest.raises(ConfigError, match=r"vLLM cannot load weights into a running \w+: .* swap = 'restart'"):
                await host.swap(folders[0], version(0), SwapMode.ABORT)
        for number, mode in (() if family in RESTARTED else SWAPS) + (RESTART if ALL or family in RESTARTED else ()):
            await host.swap(folders[number], version(number), mode, probes[number])
            worst = await worst_error(host, folders)
            assert host.check is not None
            print(f"\n{family}, {mode}: largest error {worst:.1e}, probe {host.check.difference:.1e}")
            assert worst < TOLERANCE
        if family not in RESTARTED:
            with pytest.raises(WeightsRejected):
                await host.swap(folders[0], version(9), SwapMode.ABORT, probes[1])

    with_host(options(folders[0], max_model_len=CONTEXT_TOKENS), scenario)


@pytest.mark.parametrize("family", [one for one in TESTED if one not in EXPERTS] if ALL else ["gemma2"])
def test_every_token_has_the_logprob_of_the_adapter_that_it_claims(family: str, tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", family, 0)
    adapters = [lora(tmp_path / f"adapter-{seed}", base, seed) for seed in range(2)]
    folders = [merged(tmp_path / adapter.name.replace("adapter", "merged"), base, adapter) for adapter in adapters]

    async def scenario(host: EngineHost) -> None:
        for number, adapter in enumerate(adapters):
            await host.swap(adapter, version(number), SwapMode.KEEP, probe_in(folders[number]))
            worst = await worst_error(host, folders)
            print(f"\n{family}, adapter: largest error {worst:.1e}")
            assert worst < TOLERANCE

    with_host(options(base, max_model_len=CONTEXT_TOKENS, enable_lora=True, max_lora_rank=8), scenario)


@pytest.mark.parametrize("family", sorted(EXPERTS) if ALL else ["mixtral"])
def test_adapters_on_experts_are_refused_at_start(family: str, tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", family, 0)

    async def scenario(host: EngineHost) -> None:
        raise AssertionError("vLLM has started")

    with pytest.raises(ConfigError, match=r"vLLM on the CPU cannot run adapters on experts, which \w+ has"):
        with_host(options(base, max_model_len=CONTEXT_TOKENS, enable_lora=True), scenario)


@pytest.mark.parametrize("family", [one for one in TESTED if one not in RESTARTED] if ALL else ["qwen3_moe"])
def test_every_token_of_a_server_has_the_logprob_of_the_weights_that_were_pushed(family: str, tmp_path: Path) -> None:
    folders = [make_model(tmp_path / str(seed), family, seed) for seed in range(3)]

    async def scenario(server: VllmServer) -> None:
        engine = OpenAIEngine(OpenAISettings(urls=(server.url,), push_model=folders[0]))
        await engine.start()
        try:
            for number, mode in SWAPS:
                await engine.swap(folders[number], version(number), mode)
                worst = await worst_error(engine, folders)
                print(f"\n{family}, pushed with {mode}: largest error {worst:.1e}")
                assert worst < TOLERANCE
        finally:
            await engine.close()

    more = ("--max-model-len", str(CONTEXT_TOKENS))
    with VllmServer(folders[0], free_port(), tmp_path / "server.log", *more) as server:
        server.wait()
        asyncio.run(scenario(server))
