"""The ranks of a launch, as forks of one process that has imported torch and TRL."""

import os
import runpy
import socket
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.forks import FORKS
from support.waiting import PATIENCE_S


def start_ranks(ranks: int, work: Callable[..., object], *given: Any) -> list[BaseProcess]:
    """Call `work(*given)`, a function of a module, in as many ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[BaseProcess] = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.append(FORKS.Process(target=_rank, args=(place if ranks > 1 else {}, work, given)))
        processes[-1].start()
    return processes


def run_in_ranks(ranks: int, work: Callable[..., object], *given: Any) -> list[int | None]:
    """Call `work(*given)`, a function of a module, in as many ranks; returns their exit codes."""
    processes = start_ranks(ranks, work, *given)
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


def _rank(place: Mapping[str, str], work: Callable[..., object], given: tuple[Any, ...]) -> None:
    os.environ |= place
    work(*given)
    os._exit(0)  # to take a group down that DDP has used may block for good
