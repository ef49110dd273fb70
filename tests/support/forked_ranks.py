"""The ranks of a launch as forks of one process that has imported torch and TRL, which takes each of them seconds."""

import os
import runpy
import socket
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from support.waiting import PATIENCE_S

PRELOADED = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.qwen3.modeling_qwen3"]
PRELOADED += ["accelerate", "rollq.integrations.trl.trainer", "support.trl_runs"]


def run_in_ranks(ranks: int, work: Callable[..., object], *given: Any) -> list[int | None]:
    """Call `work(*given)`, a function of a module, in as many ranks; returns their exit codes."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [context.Process(target=_rank, args=(rank, ranks, port, work, given)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    return [process.exitcode for process in processes]


def run_script(script: Path, ranks: int) -> str:
    """Run a script in its folder, as torchrun does; returns its output. It must succeed."""
    log = script.with_suffix(".log")
    log.unlink(missing_ok=True)
    codes = run_in_ranks(ranks, _script, script, log)
    assert codes == [0] * ranks, log.read_text()
    return log.read_text()


def _script(script: Path, log: Path) -> None:
    os.chdir(script.parent)
    with log.open("a", buffering=1) as output, redirect_stdout(output), redirect_stderr(output):
        runpy.run_path(str(script), run_name="__main__")


def _rank(rank: int, ranks: int, port: int, work: Callable[..., object], given: tuple[Any, ...]) -> None:
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    work(*given)
    os._exit(0)  # to take a group down that DDP has used may block for good
