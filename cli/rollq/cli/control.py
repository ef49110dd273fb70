"""Commands that steer a run's production: `rollq pause`, `rollq resume` and `rollq drain`."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.errors import ConfigError
from rollq.cli.options import run_options

if TYPE_CHECKING:
    from rollq.buffer.buffer import Buffer
    from rollq.buffer.replies import Control
    from rollq.buffer.steering import Order

_OPTIONS = (
    click.option("--task", "tasks", multiple=True, help="Only this task; may be repeated."),
    click.option(
        "--worker",
        "workers",
        multiple=True,
        help="Only this worker, as `rollq status` names it, or all with this name.",
    ),
)


def target_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add FILE, --url, --run, --task and --worker."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return run_options(command)


@click.command()
@target_options
def pause(
    file: Path | None, url: str | None, run_name: str | None, tasks: tuple[str, ...], workers: tuple[str, ...]
) -> None:
    """Stop workers from taking new groups. Running groups finish or are interrupted, as [worker] pause says.

    A task whose production has ended or was stopped stays as it is.

    \b
    Example:
      rollq pause rollq.toml
      rollq pause rollq.toml --task math
      rollq pause rollq.toml --worker gpu1
    """
    from rollq.buffer.replies import Control
    from rollq.buffer.steering import Order

    with _open(file, url, run_name, tasks, workers) as buffer:
        if workers:
            _order_all(buffer, workers, Order.PAUSE)
        else:
            _set_all(buffer, tasks, Control.PAUSE, "by hand", unless={Control.STOPPED, Control.DONE})


@click.command()
@target_options
def resume(
    file: Path | None, url: str | None, run_name: str | None, tasks: tuple[str, ...], workers: tuple[str, ...]
) -> None:
    """Resume production that was paused, or that stopped because too few groups were worth training.

    A task that was ended by its own should_continue hook, or drained, resumes only when it is named with --task; the
    hook is then asked again.

    \b
    Example:
      rollq resume rollq.toml
      rollq resume rollq.toml --task math
      rollq resume rollq.toml --worker gpu1
    """
    from rollq.buffer.replies import Control
    from rollq.buffer.steering import Order

    with _open(file, url, run_name, tasks, workers) as buffer:
        if workers:
            _order_all(buffer, workers, Order.RUN)
        else:
            _set_all(buffer, tasks, Control.RUN, "", unless=set() if tasks else {Control.DONE})


@click.command()
@target_options
def drain(
    file: Path | None, url: str | None, run_name: str | None, tasks: tuple[str, ...], workers: tuple[str, ...]
) -> None:
    """Admit no new prompts, and finish the groups that are on their way.

    A trainer ends when no further batch can fill. With --worker, that worker takes no new groups and stops when those
    that it has have ended, at the latest after [worker] grace_s; nothing that it has made is lost.

    \b
    Example:
      rollq drain rollq.toml
      rollq drain rollq.toml --task math
      rollq drain rollq.toml --worker gpu1-3f2a9c10
    """
    from rollq.buffer.replies import Control
    from rollq.buffer.steering import Order

    with _open(file, url, run_name, tasks, workers) as buffer:
        if workers:
            _order_all(buffer, workers, Order.DRAIN)
        else:
            _set_all(buffer, tasks, Control.DONE, "drained by hand", unless={Control.STOPPED})


def _open(
    file: Path | None, url: str | None, run_name: str | None, tasks: Sequence[str], workers: Sequence[str]
) -> "Buffer":
    from rollq.cli.run_location import find_run

    if tasks and workers:
        raise ConfigError("--task and --worker: give one of them")
    return find_run(file, url, run_name).without_payloads()


def _order_all(buffer: "Buffer", names: Sequence[str], order: "Order") -> None:
    """Give an order to the workers that are called, or whose [worker] name is, one of `names`."""
    reports = buffer.workers()
    for name in names:
        if not (found := [worker for worker in reports if name in (worker, worker.rpartition("-")[0])]):
            raise ConfigError(f"--worker {name!r}: run {buffer.run!r} has the workers {', '.join(reports) or 'none'}")
        for worker in found:
            buffer.order_worker(worker, order)
            click.echo(f"worker {worker}: {order.value}")


def shards_of(buffer: "Buffer", tasks: "Sequence[str]", name: str) -> list[str]:
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
    chosen = [shard for name in names for shard in shards_of(buffer, tasks, name)]
    for task in chosen or tasks:
        before = buffer.clock(task).control
        if before is Control.SLEEP:
            raise ConfigError(f"task {task!r} sleeps while the trainer uses the GPUs; the trainer will wake it")
        if before in unless:
            click.echo(f"task {task}: stays {before.value}")
        else:
            buffer.set_control(task, control, reason)
            click.echo(f"task {task}: {before.value} -> {control.value}")
