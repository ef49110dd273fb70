"""Commands that steer a run's production: `rollq pause` and `rollq resume`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.errors import ConfigError
from rollq.cli.options import run_options

if TYPE_CHECKING:
    from rollq.buffer.calls.orders import Order

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
@click.option("--drain", is_flag=True, help="End production: admit no new prompts, and finish the existing groups.")
def pause(
    file: Path | None,
    url: str | None,
    run_name: str | None,
    tasks: tuple[str, ...],
    workers: tuple[str, ...],
    drain: bool,
) -> None:
    """Stop workers from taking new groups. Running groups finish or are interrupted, as [worker] pause says.

    A task whose production has ended or was stopped does not change.

    With --drain, a trainer ends when no further batch can fill. A drained worker stops once its groups have ended, or
    after [worker] grace_s; no finished work is lost.

    \b
    Example:
      rollq pause rollq.toml
      rollq pause rollq.toml --task math --drain
      rollq pause rollq.toml --worker gpu1
    """
    from rollq.buffer.calls.orders import Order

    _steer(Order.DRAIN if drain else Order.PAUSE, file, url, run_name, tasks, workers)


@click.command()
@target_options
def resume(
    file: Path | None, url: str | None, run_name: str | None, tasks: tuple[str, ...], workers: tuple[str, ...]
) -> None:
    """Resume production that was paused, or that stopped because too few groups were worth training.

    A task that its should_continue hook ended, or that was drained, resumes only if --task names it; the hook is then
    asked again.

    \b
    Example:
      rollq resume rollq.toml
      rollq resume rollq.toml --task math
      rollq resume rollq.toml --worker gpu1
    """
    from rollq.buffer.calls.orders import Order

    _steer(Order.RUN, file, url, run_name, tasks, workers)


def _steer(
    order: "Order",
    file: Path | None,
    url: str | None,
    run_name: str | None,
    tasks: Sequence[str],
    workers: Sequence[str],
) -> None:
    from rollq.cli.run_location import find_run
    from rollq.cli.steering import steer_tasks, steer_workers

    if tasks and workers:
        raise ConfigError("--task and --worker: give one of them")
    with find_run(file, url, run_name).without_payloads() as buffer:
        for line in steer_workers(buffer, workers, order) if workers else steer_tasks(buffer, tasks, order):
            click.echo(line)
