"""Ranks of the reference trainer, each in a process that can be made to kill itself at a chosen moment.

A moment is a key of `MOMENTS` with `before` or `after`, such as `before publish`.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from rollq.buffer.buffer import Buffer
from rollq.consumer.claims.connection import Connection
from rollq.consumer.consumer import Consumer
from rollq.consumer.settings import ConsumerSettings, TrainerSettings
from rollq.consumer.trainer import checkpoints, taking, trainer
from rollq.consumer.trainer.learner import Learner
from rollq.consumer.trainer.metrics_files import METRICS_FILE
from rollq.consumer.weights import checkpoint_format
from support.forked_ranks import start_ranks
from support.manual_worker import HandWorker, make_run
from support.tiny_qwen3 import tiny_qwen3
from support.waiting import PATIENCE_S

MOMENTS: dict[str, tuple[Any, str]] = {
    "claim": (taking.BatchTaker, "take"),
    "gradients": (Learner, "gradients"),
    "update": (Learner, "update"),
    "publish": (Consumer, "publish"),
    "commit": (Consumer, "commit"),
    "save": (trainer, "save_checkpoint"),
    "stream": (checkpoints, "model_stream"),
    "gather": (checkpoint_format, "gather"),  # of each tensor that is written
    "checkpoint": (Consumer, "checkpoint"),
}
"""Name -> the function that every rank calls then."""


def short_training(model: Path, output: Path, **changed: object) -> TrainerSettings:
    """Settings of four steps on one thread, with a checkpoint every other step."""
    values = {
        "model": model,
        "output": output,
        "steps": 4,
        "checkpoint_every": 2,
        "timeout_s": PATIENCE_S,
        "micro_batch_tokens": 40,
        "max_mismatch": None,
        "threads": 1,
    }
    return TrainerSettings.model_validate({**values, **changed})


class Kill(NamedTuple):
    """The rank `rank` dies at its call number `calls` of `moment`, such as `before publish`."""

    rank: int
    moment: str
    calls: int


def run_ranks(
    world_size: int,
    url: str,
    run: str,
    settings: TrainerSettings,
    kill: Kill | None = None,
    *,
    gathered: Path | None = None,
    streamed: bool = False,
) -> list[int | None]:
    """Run all ranks; if one fails, kill the others. Returns their exit codes. `gathered` is a folder to which rank 0
    writes the weights of each checkpoint as torch gathers them. With `streamed`, batches are trained while they fill,
    however short the steps are.
    """
    ranks = start_ranks(world_size, _train, url, run, settings.model_dump_json(), kill, gathered, streamed)
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        for ended in wait(running):
            assert isinstance(ended, int)
            rank = running.pop(ended)
            rank.join()
            if rank.exitcode:
                for other in running.values():
                    other.kill()
    return [rank.exitcode for rank in ranks]


@contextmanager
def filled(url: str, run: str, model: Path, folder: Path, steps: int, *, tied: bool = False) -> Iterator[Buffer]:
    """A run with the groups of `steps` steps, all of version 0, so that its batches do not depend on who dies when."""
    with Buffer.connect(url, run) as buffer:
        make_run(buffer, max_staleness=steps, max_uncheckpointed_steps=steps)
        with Consumer.connect(url, run=run, weights=model, settings=ConsumerSettings(transport="redis")):
            HandWorker(buffer, tiny_qwen3(tied=tied), folder).produce(2 * steps)
        yield buffer


def metrics(settings: TrainerSettings) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (settings.output / METRICS_FILE).read_bytes().splitlines()]


def _arm(moment: str, calls: int) -> None:
    when, name = moment.split()
    owner, attribute = MOMENTS[name]
    real: Callable[..., Any] = getattr(owner, attribute)
    seen = 0

    def dying(*args: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == calls and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **options)
        if seen == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, attribute, dying)


def _gather_into(folder: Path) -> None:
    """Have each checkpoint's weights gathered whole, by torch itself, as `folder`/<step>.safetensors."""
    real = checkpoints.save_checkpoint

    def saving(output: Path, step: int, lineage: str, model: Any, *more: Any, rank: int, **options: Any) -> Any:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = (
            get_model_state_dict(model, options=whole) if dist.is_initialized() else model.state_dict()
        )
        if rank == 0:
            save_file({name: tensor.clone() for name, tensor in state.items()}, folder / f"{step}.safetensors")
        return real(output, step, lineage, model, *more, rank=rank, **options)

    setattr(trainer, "save_checkpoint", saving)  # noqa: B010 - for mypy


def _train(url: str, run: str, settings: str, kill: Kill | None, gathered: Path | None, streamed: bool) -> None:
    """Train as one rank."""
    if streamed:
        setattr(taking, "is_worth_streaming", lambda times: True)  # noqa: B010 - for mypy
    if kill is not None and kill.rank == int(os.environ.get("RANK", "0")):
        _arm(kill.moment, kill.calls)
    if gathered is not None:
        _gather_into(gathered)
    trainer.train(Connection(url, run), TrainerSettings.model_validate_json(settings))
