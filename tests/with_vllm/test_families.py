"""Models of many families in vLLM: their logprobs are right after every swap, or they are refused.

`ROLLQ_FAMILIES=all` tests all families, a few minutes each on a busy machine; by default three that were wrong once.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollq.buffer.errors import ConfigError
from rollq.consumer.weights.probe import probe_of
from rollq.workers.engines.host import EngineHost, WeightsRejected
from rollq.workers.engines.protocol import Request, Sampling, SwapMode
from rollq.workers.engines.registry import make_engine
from support.model_families import FAMILIES, make_model
from support.vllm_run import TOLERANCE, check, options, random_prompt, version

RESTARTED = {"gpt_oss"}
"""vLLM cannot reload these."""
ONCE_WRONG = ("gemma2", "gpt_oss", "qwen3_moe")
TESTED = tuple(FAMILIES) if os.environ.get("ROLLQ_FAMILIES") == "all" else ONCE_WRONG
SWAPS = ((0, SwapMode.ABORT), (1, SwapMode.ABORT), (2, SwapMode.KEEP))


def with_host(folder: Path, scenario: Callable[[EngineHost], Awaitable[Any]]) -> None:
    async def run() -> None:
        host = EngineHost(lambda: make_engine("vllm", options(folder, max_model_len=1024)), restarts=0)
        await host.start()
        try:
            await scenario(host)
        finally:
            await host.close()

    asyncio.run(run())


def probe_in(folder: Path) -> Any:
    return probe_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager"))


@pytest.mark.parametrize("family", TESTED)
def test_every_token_has_the_logprob_of_the_weights_that_it_claims(family: str, tmp_path: Path) -> None:
    folders = [make_model(tmp_path / str(seed), family, seed) for seed in range(3)]
    rng = np.random.default_rng(0)

    async def scenario(host: EngineHost) -> None:
        swaps = ((1, SwapMode.RESTART),) if family in RESTARTED else SWAPS
        if family in RESTARTED:
            with pytest.raises(ConfigError, match=r"vLLM cannot load weights into a running \w+: .* swap = 'restart'"):
                await host.swap(folders[0], version(0), SwapMode.ABORT)
        for number, mode in swaps:
            await host.swap(folders[number], version(number), mode, probe_in(folders[number]))
            requests = [Request(random_prompt(rng, length), Sampling(max_tokens=40)) for length in (5, 50, 200)]
            made = await asyncio.gather(*map(host.generate, requests))
            worst = max(check(request, one, folders) for request, one in zip(requests, made, strict=True))
            assert host.check is not None
            print(f"\n{family}, {mode}: largest error {worst:.1e}, probe {host.check.difference:.1e}")
            assert worst < TOLERANCE
        if family not in RESTARTED:
            with pytest.raises(WeightsRejected):
                await host.swap(folders[0], version(9), SwapMode.ABORT, probe_in(folders[1]))

    with_host(folders[0], scenario)
