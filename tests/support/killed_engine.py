"""A vLLM with two engine workers that serves and swaps until it is killed; run as a module by a test.

usage: python -m support.killed_engine MODEL OTHER_MODEL. Prints `started`, `swapped` and `died` when it happens.
"""

import asyncio
import sys
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import EngineDead, Request, Sampling, SwapMode
from rollq.workers.engines.registry import make_engine
from support.vllm_run import options, version

TWO_WORKERS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
REQUEST = Request(np.array([40, 50, 60], np.int32), Sampling(max_tokens=200, top_k=1))


async def main(models: list[Path]) -> None:
    host = EngineHost(partial(make_engine, "vllm", options(models[0], **TWO_WORKERS)), restarts=10)
    await host.start()
    print("started", flush=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(host.keep_alive())
        tasks.create_task(swap(host, models))
        tasks.create_task(serve(host))


async def swap(host: EngineHost, models: list[Path]) -> None:
    """Swap without end, in every life of the engine."""
    for number in count(1):
        try:
            await host.swap(models[number % 2], version(number), SwapMode.KEEP)
            print("swapped", flush=True)
        except EngineDead:
            print("died", flush=True)
            await until_it_lives(host)
            print("started", flush=True)


async def serve(host: EngineHost) -> None:
    """Generate without end, in every life of the engine."""
    while True:
        with suppress(EngineDead):
            await host.generate(REQUEST)
        await until_it_lives(host)


async def until_it_lives(host: EngineHost) -> None:
    while host.version is None:
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main([Path(name) for name in sys.argv[1:]]))
