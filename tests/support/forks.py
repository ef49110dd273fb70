"""Processes of tests, as forks of one that has imported what takes each of them seconds: torch, transformers and TRL.

There is one such process per test process, and it cannot import tests: only what is installed can be preloaded.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROLES = [
    "rollq.cli.settings.file",
    "rollq.workers.run",
    "rollq.producer.run",
    "rollq.consumer.consumer",
    # imported at their first use
    "encodings.idna",
    "numpy.ma",
    "importlib.readers",
]
"""Modules of the roles, without torch."""
MODELS = [
    "accelerate",
    "peft",
    "rollq.consumer.trainer.trainer",
    "rollq.integrations.trl.trainer",
    "rollq.workers.engines.transformers.engine",
    "rollq.workers.weight_follower",
    "safetensors.torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
]
"""Modules of workers and trainers with a model."""

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(ROLES + MODELS)


def start_forks() -> None:
    """Wait until the process is there of which all others are forks."""
    process = FORKS.Process(target=os.getpid)
    process.start()
    process.join()


def fork(folder: Path, log: Path, work: Callable[..., object], *given: Any) -> BaseProcess:
    """Call `work(*given)`, a function of a module, in a process in `folder`, with our environment and `log`."""
    process = FORKS.Process(target=_work, args=(folder, log, dict(os.environ), work, given))
    process.start()
    return process


def _work(
    folder: Path, log: Path, environment: Mapping[str, str], work: Callable[..., object], given: tuple[Any, ...]
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment
    tempfile.tempdir = None  # that of the first fork was kept
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    work(*given)
