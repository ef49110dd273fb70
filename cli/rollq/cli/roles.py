"""The roles, one process each: `rollq produce`, `rollq work`, `rollq train`."""

import logging
from contextlib import ExitStack
from pathlib import Path

import click

from rollq.cli.logs import log_options
from rollq.cli.stop import stop_on_signals

log = logging.getLogger(__name__)

settings_file = click.argument("file", type=click.Path(path_type=Path))


@click.command()
@settings_file
@log_options
def produce(file: Path) -> None:
    """Schedule prompts for all tasks of the run, as far ahead as its weights allow, until told to stop.

    Any number of producers may run; they need no GPU and no torch.

    \b
    Example:
      rollq produce rollq.toml
    """
    from rollq.cli.settings import load_settings
    from rollq.cli.setup import Place, open_run
    from rollq.producer.loop import Feed, Producer
    from rollq.producer.prompts import PromptFile
    from rollq.producer.sampler import Sampler

    settings = load_settings(file)
    stop = stop_on_signals()
    with ExitStack() as stack:
        feeds = []
        for name, task in settings.tasks.items():
            source = stack.enter_context(PromptFile(task))
            log.info("task %s: %d prompts in %s", name, source.rows, task.prompts)
            feeds.append(Feed(name, task, Sampler(source, (settings.seed, task.shuffle_seed), task.on_bad_prompt)))
        buffer = stack.enter_context(open_run(settings, stop))
        log.info("producing for run %r", settings.run)
        Producer(buffer, Place.of(settings).queue(), settings.producer, feeds).run(stop)
    log.info("stopped")
