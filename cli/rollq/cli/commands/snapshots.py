"""Commands that save and restore a run's buffer: `rollq checkpoint`, `rollq restore`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.cli.options import run_options

if TYPE_CHECKING:
    from rollq.buffer.snapshots.save import Report

QUIET_S = 1.0
"""Seconds after which a progress bar appears."""

directory_argument = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))


@click.command()
@directory_argument
@run_options
@click.option("--replace", is_flag=True, help="Replace the snapshot in DIR once the new one is complete.")
def checkpoint(directory: Path, file: Path | None, url: str | None, run_name: str | None, replace: bool) -> None:
    """Save the run's buffer to the folder DIR while the run continues. DIR appears complete or not at all.

    \b
    Example:
      rollq checkpoint backups/step-100 rollq.toml
      rollq checkpoint backups/now --url redis://127.0.0.1:6379/0 --run sums --replace
    """
    from rollq.cli.run_location import find_run

    with find_run(file, url, run_name).buffer() as buffer, _bar("save") as report:
        snapshot = buffer.save(directory, replace=replace, report=report)
    first, last = snapshot.resume_steps
    click.echo(f"saved {snapshot.groups} groups of run {snapshot.run!r} to {directory}")
    click.echo(f"it belongs to the trainer's checkpoint of step {_steps(first, last)}")


@click.command()
@directory_argument
@run_options
def restore(directory: Path, file: Path | None, url: str | None, run_name: str | None) -> None:
    """Restore the buffer saved in the folder DIR into a run that does not exist yet.

    With FILE, its settings must match those that the run was saved with. Nothing is generated until a trainer starts.
    If this command is interrupted, repeat it.

    \b
    Example:
      rollq restore backups/step-100 rollq.toml
      rollq restore backups/step-100 --url redis://127.0.0.1:6379/0 --run sums
    """
    from rollq.buffer.rules.shards import check_shards
    from rollq.buffer.snapshots.folder import read_index
    from rollq.cli.run_location import find_run
    from rollq.cli.settings.file import load_settings

    location = find_run(file, url, run_name)
    settings = load_settings(file) if file else None
    rules = settings.all_tasks() if settings else {}
    with location.buffer() as buffer, _bar("restore") as report:
        check_shards(read_index(directory)[0].tasks, rules)
        snapshot = buffer.restore(directory, rules=rules, report=report)
    for task in sorted(rules.keys() - snapshot.tasks.keys()):
        click.echo(f"warning: task {task!r} is not in {directory}: it starts from the beginning", err=True)
    first, last = snapshot.resume_steps
    click.echo(f"restored {snapshot.groups} groups of run {snapshot.run!r}, saved {snapshot.saved_at}")
    click.echo(f"now start the trainer from its checkpoint of step {_steps(first, last)}")


def _steps(first: int, last: int) -> str:
    return f"{last}" if first == last else f"{last} (or any from {first} on)"


@contextmanager
def _bar(verb: str) -> "Iterator[Report]":
    from tqdm import tqdm

    with tqdm(desc=verb, unit=" groups", delay=QUIET_S) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report
