"""The roles, one process each: `rollq produce`, `rollq work`, `rollq train`."""

import logging
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.errors import ConfigError, RollqError
from rollq.cli.logs import log_options
from rollq.cli.signals import stop_on_signals

if TYPE_CHECKING:
    from rollq.workers.settings import WorkerSettings

log = logging.getLogger(__name__)

settings_file = click.argument("file", type=click.Path(path_type=Path))


@click.command()
@settings_file
@log_options
def produce(file: Path) -> None:
    """Schedule prompts for all tasks of the run, as far ahead as its weights allow, until told to stop.

    Any number of producers may run; they need no GPU and no torch. Hooks of your own are imported from the folder of
    FILE, or from what is installed.

    \b
    Example:
      rollq produce rollq.toml
    """
    from rollq.buffer.plugins import load_plugin
    from rollq.cli.run_location import RunLocation, open_run
    from rollq.cli.settings_file import load_settings
    from rollq.producer.producer import EvaluationFeed, Producer, TaskFeed
    from rollq.producer.prompt_order import make_order
    from rollq.producer.prompts import PromptFile
    from rollq.producer.sampler import Sampler

    settings = load_settings(file)
    sys.path.append(str(file.absolute().parent))
    stop = stop_on_signals()
    with ExitStack() as stack:
        parts = {}  # what is wrong with files and plugins is told before the server is needed
        for name, task in settings.tasks.items():
            hook = load_plugin("should_continue", task.should_continue, {}) if task.should_continue else None
            source = stack.enter_context(PromptFile(task))
            log.info("task %s: %d prompts in %s", name, source.rows, task.prompts)
            parts[name] = (source, make_order(task), hook)
        evaluations = []
        for name, asked in settings.evaluations.items():
            source = stack.enter_context(PromptFile(asked))
            log.info("evaluation %s: %d prompts in %s", name, source.rows, asked.prompts)
            evaluations.append(EvaluationFeed(name, source, asked.on_bad_prompt))
        buffer = stack.enter_context(open_run(settings, stop))
        feeds = []
        for name, task in settings.tasks.items():
            source, order, hook = parts[name]
            seeds, stats_of = (settings.seed, task.shuffle_seed), partial(buffer.prompt_stats, name)
            sampler = Sampler(source, seeds, task.on_bad_prompt, order, stats_of)
            feeds.append(TaskFeed(name, task, sampler, task.min_keep_rate, hook))
        log.info("producing for run %r", settings.run)
        Producer(buffer, RunLocation.of(settings).queue(), settings.producer, feeds, evaluations).run(stop)
    log.info("stopped")


@click.command()
@settings_file
@click.option("--name", help="Name of this worker, instead of [worker] name; a random part is added.")
@log_options
def work(file: Path, name: str | None) -> None:
    """Generate and judge groups with one engine until told to stop; one process per GPU.

    Judges and agent loops of your own are imported from the folder of FILE, or from what is installed.

    \b
    Example:
      rollq work rollq.toml
      CUDA_VISIBLE_DEVICES=1 rollq work rollq.toml --name gpu1
    """
    from rollq.cli.run_location import RunLocation, fingerprints, open_run
    from rollq.cli.settings_file import load_settings
    from rollq.workers.engines.protocol import EngineDead
    from rollq.workers.run import run_worker

    settings = load_settings(file)
    worker = settings.worker if name is None else _renamed(settings.worker, name)
    sys.path.append(str(file.absolute().parent))
    model = worker.options.get("model")
    with open_run(settings, threading.Event(), **fingerprints(model, worker.tokenizer or model)) as buffer:
        log.info("working for run %r as %s", settings.run, worker.name)
        try:
            run_worker(
                buffer,
                RunLocation.of(settings).queue(),
                settings.all_tasks(),
                worker,
                seed=settings.seed,
            )
        except EngineDead as error:
            raise RollqError(f"the engine is gone: {error}") from error
    log.info("stopped")


@click.command()
@settings_file
@log_options
def train(file: Path) -> None:
    """Train on batches of groups with the reference GRPO trainer, and publish the weights.

    Goes on from the newest checkpoint in its output folder. SIGTERM or Ctrl-C saves one and ends it.

    \b
    Example:
      rollq train rollq.toml
    """
    from rollq.cli.run_location import RunLocation, fingerprints, open_run
    from rollq.cli.settings_file import load_settings

    settings = load_settings(file)
    trainer = settings.trainer
    if trainer is None:
        raise ConfigError(f"{file}: has no table [trainer], which `rollq train` needs")
    try:
        from rollq.consumer.trainer import train as run_trainer
    except ModuleNotFoundError as error:
        raise ConfigError(f"`rollq train` needs the package {error.name!r}: pip install 'rollq[torch]'") from error
    stop = stop_on_signals()
    # closing the buffer sets its event, so it gets one of its own
    with open_run(settings, threading.Event(), **fingerprints(trainer.model, trainer.model)):
        place = RunLocation.of(settings)
    step = run_trainer(place.buffer_url, place.run, trainer, password=place.password, seed=settings.seed, stop=stop)
    log.info("stopped after step %d of %d", step, trainer.steps)


def _renamed(worker: "WorkerSettings", name: str) -> "WorkerSettings":
    from pydantic import ValidationError

    try:
        return type(worker).model_validate({**dict(worker), "name": name})
    except ValidationError as error:
        raise ConfigError(f"--name {name!r}: 1 to 32 characters of A-Z a-z 0-9 _ - are allowed") from error
