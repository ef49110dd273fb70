"""What tests with a real vLLM on the CPU need: models that it can serve, an engine that many tests share, and plain
forward passes to compare with."""

import asyncio
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rollq.buffer.values.rollouts import Float32Array, Int32Array
from rollq.cli.demo.tiny_model import make_tokenizer
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import Completion, Engine, Request, Sampling, SwapMode, WeightsVersion
from rollq.workers.engines.registry import make_engine
from support.model_families import SHAPE, VOCABULARY
from support.waiting import PATIENCE_S

CONTEXT_TOKENS = 4096
ENGINE_ARGS = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
"""Of vLLM, for a tiny model on the CPU."""


def make_qwen3(folder: Path, seed: int, **changes: Any) -> Path:
    """A random Qwen3 whose heads are as large as vLLM wants them on the CPU, in `folder`."""
    torch.manual_seed(seed)
    shape = {**SHAPE, "max_position_embeddings": CONTEXT_TOKENS, "tie_word_embeddings": True}
    model = Qwen3ForCausalLM(Qwen3Config(**shape | changes))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def options(folder: Path, **engine_args: Any) -> dict[str, Any]:
    """Options of an engine over the model in `folder`."""
    return {"model": folder, "dtype": "float32", "engine_args": ENGINE_ARGS | engine_args}


def with_host(given: Mapping[str, Any], scenario: Callable[[EngineHost], Awaitable[Any]]) -> None:
    """Run `scenario` with the host of an engine with the options `given`, and close it."""

    async def run() -> None:
        host = EngineHost(lambda: make_engine("vllm", given), restarts=0)
        await host.start()
        try:
            await scenario(host)
        finally:
            await host.close()

    asyncio.run(run())


class SharedEngine:
    """An engine on an event loop of its own, since it takes seconds to start."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine: Engine = self.run(_start(make))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, done on the engine's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def begin_at(self, weights: Path, version: WeightsVersion) -> None:
        """Serve `weights`, whatever was there before."""
        self.run(self.engine.wake())
        self.run(self.engine.swap(weights, version, SwapMode.ABORT))

    def close(self) -> None:
        """End engine and loop."""
        self.run(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _start(make: Callable[[], Engine]) -> Engine:
    engine = make()
    await engine.start()
    return engine


def forward_logprobs(
    folder: Path,
    ids: Int32Array,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    attention: str = "eager",
) -> Float32Array:
    """Logprobs float32 [T-1] of ids[1:] by a plain forward pass, under the truncated distribution.

    `attention` is the implementation in transformers; "eager" is for all families, "sdpa" for long prompts.
    """
    logits = forward_logits(folder, ids, attention)[:-1] / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        mass = ordered.softmax(-1)
        ordered = ordered.masked_fill(mass.cumsum(-1) - mass >= top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter(-1, order, ordered)
    target = torch.from_numpy(ids[1:]).long()[:, None]
    logprobs: Float32Array = logits.log_softmax(-1).gather(-1, target).squeeze(-1).numpy()
    return logprobs


def forward_logits(folder: Path, ids: Int32Array, attention: str = "eager") -> torch.Tensor:
    """Logits float32 [T, V] after each token of `ids`, by a plain forward pass."""
    with torch.no_grad():
        logits: torch.Tensor = _model(folder, attention)(torch.from_numpy(ids).long()[None]).logits[0]
    return logits


@cache
def _model(folder: Path, attention: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


def random_prompt(rng: np.random.Generator, tokens: int) -> Int32Array:
    return rng.integers(2, VOCABULARY, tokens, dtype=np.int32)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_environment() -> dict[str, str]:
    """What vLLM's CPU build wants in its environment."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


os.environ.update(cpu_environment())


MIXED = (
    Sampling(max_tokens=12, temperature=1.0),
    Sampling(max_tokens=7, temperature=0.5),
    Sampling(max_tokens=20, temperature=1.7),
    Sampling(max_tokens=9, temperature=1.0, top_k=5),
    Sampling(max_tokens=15, temperature=0.8, top_p=0.6),
    Sampling(max_tokens=11, temperature=1.2, top_k=40, top_p=0.9),
)
TOLERANCE = 1e-4
"""Of a logprob in fp32, between vLLM's CPU kernels and transformers'."""


def version(index: int) -> WeightsVersion:
    return WeightsVersion(1, index, f"digest-{index}")


def check(request: Request, completion: Completion, folders: Sequence[Path]) -> float:
    """The largest difference of a completion's logprobs from those of the weights `folders[version]` that it claims."""
    prefix = () if request.prefix_ids is None else request.prefix_ids
    ids = np.concatenate([request.prompt_ids, np.asarray(prefix, np.int32), completion.ids])
    start, sampling, worst = len(ids) - len(completion.ids), request.sampling, 0.0
    ends = [0, *accumulate(span.tokens for span in completion.versions)]
    for span, (first, last) in zip(completion.versions, pairwise(ends), strict=True):
        again = forward_logprobs(folders[span.version], ids, sampling.temperature, sampling.top_k, sampling.top_p)[
            start - 1 :
        ]
        worst = max(worst, float(np.abs(again[first:last] - completion.logprobs[first:last]).max()))
    return worst
