"""Commands that run a role in this process: `rollq produce`, `rollq work` and `rollq train`."""

import logging
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.errors import ConfigError, RollqError
from rollq.cli.logs import log_arguments, log_options
from rollq.cli.options import settings_file
from rollq.cli.signals import stop_on_signals

if TYPE_CHECKING:
    from rollq.workers.settings import WorkerSettings

log = logging.getLogger(__name__)


@click.command()
@settings_file
@log_options
def produce(file: Path) -> None:
    """Schedule prompts for all tasks of the run, as far ahead as their rules allow, until stopped.

    Any number of producers may run; they need neither a GPU nor torch. Custom hooks are imported from the folder of
    FILE, or from installed packages.

    \b
    Example:
      rollq produce rollq.toml
    """
    from rollq.cli.run_location import RunLocation, open_run
    from rollq.cli.settings.environment_rows import identities, write_missing_prompts
    from rollq.cli.settings.file import load_settings
    from rollq.producer.run import check_all_prompts, open_prompts, run_producer

    settings = load_settings(file)
    tasks = settings.produced_tasks()
    _check_sampled("produce", bool(tasks or settings.evaluations), file)
    sys.path.append(str(file.absolute().parent))
    known = identities(settings, with_rows=True)
    write_missing_prompts(settings, file)
    stop = stop_on_signals()
    with (
        open_prompts(tasks, settings.evaluations, settings.row_readers()) as prompts,
        open_run(
            settings, stop, identities=known, check=partial(check_all_prompts, prompts=prompts, seed=settings.seed)
        ) as buffer,
    ):
        log.info("producing for run %r", settings.run)
        queue = RunLocation.from_settings(settings).queue()
        run_producer(buffer, queue, prompts, settings.producer, seed=settings.seed, stop=stop)
    log.info("stopped")


@click.command()
@settings_file
@click.option("--name", help="Name of this worker, instead of [worker] name; a random suffix is added.")
@log_options
def work(file: Path, name: str | None) -> None:
    """Generate and judge groups with one engine until stopped; run one worker per GPU.

    Custom judges and agent loops are imported from the folder of FILE, or from installed packages.

    \b
    Example:
      rollq work rollq.toml
      CUDA_VISIBLE_DEVICES=1 rollq work rollq.toml --name gpu1
    """
    from rollq.cli.run_location import RunLocation, fingerprints, open_run, templates
    from rollq.cli.settings.environment_rows import identities
    from rollq.cli.settings.file import load_settings
    from rollq.workers.engines.protocol import EngineDead
    from rollq.workers.run import run_worker

    settings = load_settings(file)
    tasks = settings.served_tasks()
    _check_sampled("work", bool(tasks), file)
    worker = settings.worker if name is None else _renamed(settings.worker, name)
    sys.path.append(str(file.absolute().parent))
    model = worker.options.get("model")
    found = fingerprints(model, worker.tokenizer or model, "worker.options.model")
    known = {**identities(settings), **templates(settings)}
    with open_run(settings, threading.Event(), **found, identities=known) as buffer:
        log.info("working for run %r", settings.run)
        try:
            queue = RunLocation.from_settings(settings).queue()
            run_worker(buffer, queue, tasks, worker, seed=settings.seed)
        except EngineDead as error:
            raise RollqError(f"the engine died: {error}") from error
    log.info("stopped")


@click.command()
@settings_file
@click.option("--from-archive", "archive_url", help="Train on the recorded run in this folder or at this s3:// URL.")
@click.option("--ranks", type=click.IntRange(min=1), help="Train in N processes that share the model, one per GPU.")
@log_options
def train(file: Path, archive_url: str | None, ranks: int | None) -> None:
    """Train on batches of groups with the reference GRPO trainer, and publish the weights.

    Training resumes from the newest checkpoint in the output folder. SIGTERM or Ctrl-C saves one and stops. With
    --from-archive, no server is needed: the trainer gets exactly the batches that the recorded run trained. With
    --ranks, or under torchrun, the ranks share the model; any number of ranks can resume a checkpoint.

    \b
    Example:
      rollq train rollq.toml
      rollq train rollq.toml --ranks 8
      rollq train other.toml --from-archive /mnt/shared/archive/sums
      torchrun --nnodes 2 --nproc-per-node 8 ... -m rollq.consumer.launch rollq.toml
    """
    from rollq.cli.run_location import RunLocation, fingerprints, open_run
    from rollq.cli.settings.file import load_settings

    settings = load_settings(file)
    trainer = settings.trainer
    if trainer is None:
        raise ConfigError(f"{file}: `rollq train` needs a table [trainer]")
    if ranks is not None and ranks > 1:
        from rollq.cli.ranks import run_ranks

        run_ranks(
            ranks, [str(file), *([] if archive_url is None else ["--from-archive", archive_url]), *log_arguments()]
        )
        return
    if os.environ.get("RANK", "0") != "0":
        logging.getLogger("rollq").setLevel(logging.WARNING)  # all ranks do the same, and rank 0 logs it
    try:
        from rollq.consumer.claims.connection import Connection
        from rollq.consumer.trainer.from_archive import train_from_archive
        from rollq.consumer.trainer.trainer import train as run_trainer
    except ModuleNotFoundError as error:
        raise ConfigError(f"`rollq train` needs the package {error.name!r}: pip install 'rollq[torch]'") from error
    stop = stop_on_signals()
    if archive_url is not None:
        from rollq.buffer.archive.reader import Archive

        step = train_from_archive(Archive(archive_url), trainer, seed=settings.seed, stop=stop)
        log.info("stopped after step %d of %d", step, trainer.steps)
        return
    # closing a buffer sets its event, so this one must not get the trainer's
    with open_run(settings, threading.Event(), **fingerprints(trainer.model, trainer.model, "trainer.model")):
        location = RunLocation.from_settings(settings)
    step = run_trainer(
        Connection(
            location.buffer_url,
            location.run,
            password=location.password,
            payloads=location.payloads,
            archive=settings.archive.url,
        ),
        trainer,
        seed=settings.seed,
        stop=stop,
    )
    log.info("stopped after step %d of %d", step, trainer.steps)


def _check_sampled(command: str, has_some: bool, file: Path) -> None:
    if not has_some:
        raise ConfigError(
            f"{file}: `rollq {command}` has nothing to do: every task has offline = true, and `rollq import` fills it"
        )


def _renamed(worker: "WorkerSettings", name: str) -> "WorkerSettings":
    from pydantic import ValidationError

    try:
        return type(worker).model_validate({**dict(worker), "name": name})
    except ValidationError as error:
        raise ConfigError(f"--name {name!r}: 1 to 32 characters of A-Z a-z 0-9 _ - are allowed") from error
