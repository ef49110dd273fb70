"""Commands that steer a run's production: `rollq pause` and `rollq resume`."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.errors import ConfigError
from rollq.cli.options import run_options

if TYPE_CHECKING:
    from rollq.buffer.buffer import Buffer
    from rollq.buffer.replies import Control

task_option = click.option("--task", "names", multiple=True, help="Only this task; may be repeated.")


@click.command()
@run_options
@task_option
def pause(file: Path | None, url: str | None, run_name: str | None, names: tuple[str, ...]) -> None:
    """Stop workers from taking new groups. Running groups finish or are interrupted, as [worker] pause says.

    A task whose production has ended or was stopped stays as it is.

    \b
    Example:
      rollq pause rollq.toml
      rollq pause rollq.toml --task math
    """
    from rollq.buffer.replies import Control
    from rollq.cli.run_location import find_run

    with find_run(file, url, run_name).without_payloads() as buffer:
        _set_all(buffer, names, Control.PAUSE, "by hand", unless={Control.STOPPED, Control.DONE})


@click.command()
@run_options
@task_option
def resume(file: Path | None, url: str | None, run_name: str | None, names: tuple[str, ...]) -> None:
    """Resume production that was paused, or that stopped because too few groups were worth training.

    A task that was ended by its own should_continue hook resumes only when it is named with --task; the hook is then
    asked again.

    \b
    Example:
      rollq resume rollq.toml
      rollq resume rollq.toml --task math
    """
    from rollq.buffer.replies import Control
    from rollq.cli.run_location import find_run

    with find_run(file, url, run_name).without_payloads() as buffer:
        _set_all(buffer, names, Control.RUN, "", unless=set() if names else {Control.DONE})


def _shards(buffer: "Buffer", tasks: "Sequence[str]", name: str) -> list[str]:
    """The tasks of the buffer that `name` means. Raises `ConfigError` when there is none."""
    from rollq.buffer.shards import shards_among

    found = shards_among(tasks, name)
    if not found:
        raise ConfigError(f"task {name!r}: run {buffer.run!r} has the tasks {', '.join(tasks)}")
    return found


def _set_all(
    buffer: "Buffer", names: tuple[str, ...], control: "Control", reason: str, *, unless: "Collection[Control]"
) -> None:
    """Set the named tasks, or all, to `control`, except those that are in one of `unless` now."""
    from rollq.buffer.replies import Control

    tasks = buffer.tasks()
    chosen = [shard for name in names for shard in _shards(buffer, tasks, name)]
    for task in chosen or tasks:
        before = buffer.clock(task).control
        if before is Control.SLEEP:
            raise ConfigError(f"task {task!r} sleeps while the trainer uses the GPUs; the trainer will wake it")
        if before in unless:
            click.echo(f"task {task}: stays {before.value}")
        else:
            buffer.set_control(task, control, reason)
            click.echo(f"task {task}: {before.value} -> {control.value}")
