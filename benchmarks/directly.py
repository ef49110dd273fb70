"""vLLM without rollq: `python -m benchmarks.directly FOLDER` generates until it receives SIGTERM.

vLLM always has all samples of `IN_FLIGHT` groups. The file `tokens` in the folder holds the number of tokens generated
so far as one int64; it exists once vLLM is ready.
"""

import asyncio
import signal
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.generation import ENGINE_ARGS, EOS_IDS, GROUP_SIZE, IN_FLIGHT, MAX_TOKENS, TEMPERATURE
from rollq.workers.engines.host import freeze_heap
from rollq.workers.engines.protocol import Sampling
from rollq.workers.engines.vllm.api import sampling_parameters
from rollq.workers.tokenizers.hugging_face import HfTokenizer


def main(folder: Path) -> None:
    """Generate until SIGTERM."""
    tokenizer = HfTokenizer(folder / "model")
    prompts = [tokenizer.encode(orjson.loads(line)["prompt"]) for line in (folder / "prompts.jsonl").open("rb")]
    args: dict[str, Any] = {
        "dtype": "float32",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "enable_chunked_prefill": False,  # as in the worker, on the CPU
        **ENGINE_ARGS,
    }
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder / "model"), **args))
    freeze_heap()  # as the worker does
    try:
        asyncio.run(generate(engine, prompts, folder / "tokens"))
    finally:
        engine.shutdown()


async def generate(engine: AsyncLLM, prompts: list[list[int]], counter: Path) -> None:
    """Generate group after group, `IN_FLIGHT` at a time, until SIGTERM; counts tokens in the file `counter`."""
    numbers = count()
    tokens = np.memmap(counter, np.int64, "w+", shape=(1,))

    async def sample(prompt: list[int]) -> None:
        number = next(numbers)
        parameters = sampling_parameters(Sampling(MAX_TOKENS, TEMPERATURE, seed=number), MAX_TOKENS, frozenset(EOS_IDS))
        async for output in engine.generate(tokens_input(prompt), parameters, f"request-{number}"):
            tokens[0] += len(output.outputs[0].token_ids)

    async def groups(first: int) -> None:
        for index in count(first, IN_FLIGHT):
            await asyncio.gather(*(sample(prompts[index % len(prompts)]) for _ in range(GROUP_SIZE)))

    running = asyncio.gather(*(groups(first) for first in range(IN_FLIGHT)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with suppress(asyncio.CancelledError):
        await running


if __name__ == "__main__":
    main(Path(sys.argv[1]))
