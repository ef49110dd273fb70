"""A vLLM with two engine workers that a test kills while it starts; run as a module.

usage: python -m support.killed_engine MODEL
"""

import asyncio
import sys
from pathlib import Path

from rollq.workers.engines.registry import make_engine
from support.vllm_run import options

TWO_WORKERS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


async def main(model: Path) -> None:
    await make_engine("vllm", options(model, **TWO_WORKERS)).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
