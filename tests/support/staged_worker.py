"""`rollq work` with vLLM, of which a process is frozen at a stage of a swap, so that a test can kill it right there.

usage: python -m support.staged_worker SETTINGS STAGE/VICTIM...

The first swap that reaches STAGE freezes VICTIM, and prints `frozen: STAGE/VICTIM PID`; the next swap takes the next
pair. Later ones pass.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import psutil
from vllm.v1.engine.async_llm import AsyncLLM

from rollq.cli.main import main
from rollq.workers.engines.vllm import process as vllm_process
from rollq.workers.engines.vllm.engine import VllmEngine
from rollq.workers.engines.vllm.process import VllmProcess

STAGES = ("check", "pause", "load", "name", "resume", "score")
"""Of a swap, in order. `check` asks all ranks to read the folder, `score` compares the logprobs."""
RESTART_STAGES = ("check", "close", "start", "name", "score")
"""Of a swap that starts vLLM anew."""
VICTIMS = ("worker", "core", "engine worker")
SENT_S = 0.01
"""After which the worker itself is frozen, with its call on the way."""
LOOK_S = 0.01


class Stages:
    """The pairs of stage and victim that are still to come."""

    def __init__(self, pairs: list[str]) -> None:
        self.swapping = False
        self._pairs = pairs

    def reach(self, stage: str) -> None:
        """Freeze the victim if its stage is the next one."""
        if not self.swapping or not self._pairs or self._pairs[0].partition("/")[0] != stage:
            return
        pair = self._pairs.pop(0)
        self.swapping = False
        if stage == "start" or pair.endswith("/worker"):
            threading.Thread(target=freeze, args=(pair,), daemon=True).start()
        else:
            freeze(pair)


def freeze(pair: str) -> None:
    """Freeze the victim, as soon as it exists."""
    victim = pair.partition("/")[2]
    if victim == "worker":
        time.sleep(SENT_S)
    while (pid := os.getpid() if victim == "worker" else vllm_pid(victim)) is None:
        time.sleep(LOOK_S)
    print(f"frozen: {pair} {pid}", flush=True)
    os.kill(pid, signal.SIGSTOP)


def vllm_pid(victim: str) -> int | None:
    """The process id of vLLM's core, or of one of its workers; None if it does not exist."""
    cores = [child for child in psutil.Process().children() if "EngineCore" in title(child)]
    if victim == "core" or not cores:
        return cores[0].pid if cores else None
    return max((child.pid for child in cores[0].children() if "Worker" in title(child)), default=None)


def title(process: psutil.Process) -> str:
    """What vLLM calls the process; empty if it is over."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def report_stages(stages: Stages) -> None:
    """Have calls of the engine and of vLLM report the stages that they reach."""

    def reaching(owner: Any, name: str, stage: Callable[..., str]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def call(*args: Any, **keywords: Any) -> Any:
            stages.reach(stage(*args, **keywords))
            return original(*args, **keywords)

        setattr(owner, name, call)

    def swap(*_: Any) -> str:
        stages.swapping = True
        return "swap"

    reaching(VllmEngine, "swap", swap)
    reaching(VllmEngine, "score", lambda *_: "score")
    reaching(VllmProcess, "name_version", lambda *_: "name")
    reaching(VllmProcess, "close", lambda *_: "close")
    reaching(vllm_process, "start_vllm", lambda *_: "start")
    reaching(AsyncLLM, "pause_generation", lambda *_, **__: "pause")
    reaching(AsyncLLM, "resume_generation", lambda *_, **__: "resume")
    rpcs = {"rollq_check": "check", "rollq_load": "load"}
    reaching(AsyncLLM, "collective_rpc", lambda _, method, **__: rpcs.get(method, "another"))


if __name__ == "__main__":
    settings, *pairs = sys.argv[1:]
    report_stages(Stages(pairs))
    main(["work", settings])
