"""Steers production from outside: `rollq pause` and `rollq resume`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollq.buffer.errors import ConfigError

if TYPE_CHECKING:
    from rollq.buffer.replies import Control


def _target(command: Callable[..., None]) -> Callable[..., None]:
    """The arguments that both commands take."""
    options: list[Callable[[Any], Any]] = [
        click.argument("file", type=click.Path(path_type=Path), required=False),
        click.option("--url", help="URL of the server, instead of FILE."),
        click.option("--run", "run_name", help="Name of the run, with --url."),
        click.option("--task", "names", multiple=True, help="Only this task; may be given again."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@_target
def pause(file: Path | None, url: str | None, run_name: str | None, names: tuple[str, ...]) -> None:
    """Let workers take nothing new. What is under way is finished, or interrupted, as [worker] pause says.

    A task whose production has ended or was stopped stays as it is.

    \b
    Example:
      rollq pause rollq.toml
      rollq pause rollq.toml --task math
    """
    _set(file, url, run_name, names, "pause")


@click.command()
@_target
def resume(file: Path | None, url: str | None, run_name: str | None, names: tuple[str, ...]) -> None:
    """Let production go on that was paused, or that was stopped because too little was worth training.

    A task that its own should_continue hook has ended goes on only when named with --task; its hook is asked again.

    \b
    Example:
      rollq resume rollq.toml
      rollq resume rollq.toml --task math
    """
    _set(file, url, run_name, names, "run")


def _set(file: Path | None, url: str | None, run: str | None, names: tuple[str, ...], control: str) -> None:
    from rollq.buffer.replies import Control
    from rollq.cli.run_location import find_run

    with find_run(file, url, run).buffer() as buffer:
        tasks = buffer.tasks()
        if unknown := sorted(set(names) - set(tasks)):
            raise ConfigError(f"task {unknown[0]!r}: run {buffer.run!r} has the tasks {', '.join(tasks)}")
        for task in names or tasks:
            before = buffer.clock(task).control
            if before is Control.SLEEP:
                raise ConfigError(f"task {task!r} sleeps while the trainer has the GPUs; the trainer wakes it")
            if _stays(before, Control(control), named=bool(names)):
                click.echo(f"task {task}: stays {before.value}")
                continue
            buffer.set_control(task, Control(control), "by hand" if control == "pause" else "")
            click.echo(f"task {task}: {before.value} -> {control}")


def _stays(before: "Control", wanted: "Control", *, named: bool) -> bool:
    """Whether a task's control is left alone: an end outlives a pause, and the end that its hook wanted a resume."""
    if wanted == "pause":
        return before in ("stopped", "done")
    return before == "done" and not named
