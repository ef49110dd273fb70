"""Commands that save and load a run's buffer: `rollq snapshot`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.common.counting import count
from rollq.cli.options import connection_options, file_and

if TYPE_CHECKING:
    from rollq.buffer.snapshots.save import Report

QUIET_S = 1.0
"""Seconds after which a progress bar appears."""


@click.group()
def snapshot() -> None:
    """Save a run's buffer to a folder, and load it into a run that does not exist yet.

    \b
    Example:
      rollq snapshot save rollq.toml backups/step-100
      rollq snapshot load rollq.toml backups/step-100
    """


@snapshot.command(short_help="Save a run's buffer to a folder.")
@file_and(folder="FOLDER")
@connection_options
@click.option("--replace", is_flag=True, help="Replace the snapshot in FOLDER once the new one is complete.")
def save(file: Path | None, folder: str, url: str | None, run_name: str | None, replace: bool) -> None:
    """Save the run's buffer to FOLDER while the run continues. FOLDER appears complete or not at all.

    \b
    Example:
      rollq snapshot save rollq.toml backups/step-100
      rollq snapshot save backups/now --url redis://127.0.0.1:6379/0 --run sums --replace
    """
    from rollq.cli.run_location import find_run

    with find_run(file, url, run_name).buffer() as buffer, _bar("save") as report:
        saved = buffer.save(Path(folder), replace=replace, report=report)
    first, last = saved.resume_steps
    click.echo(f"saved {count(saved.groups, 'group')} of run {saved.run!r} to {folder}")
    click.echo(f"it belongs to the trainer's checkpoint of step {_steps(first, last)}")


@snapshot.command(short_help="Load a saved buffer into a new run.")
@file_and(folder="FOLDER")
@connection_options
def load(file: Path | None, folder: str, url: str | None, run_name: str | None) -> None:
    """Load the buffer saved in FOLDER into a run that does not exist yet.

    With FILE, its settings must match those that the run was saved with. Nothing is generated until a trainer starts.
    If this command is interrupted, repeat it.

    \b
    Example:
      rollq snapshot load rollq.toml backups/step-100
      rollq snapshot load backups/step-100 --url redis://127.0.0.1:6379/0 --run sums
    """
    from rollq.buffer.rules.shards import check_shards
    from rollq.buffer.snapshots.folder import read_index
    from rollq.cli.run_location import find_run
    from rollq.cli.settings.file import load_settings

    location = find_run(file, url, run_name)
    settings = load_settings(location.file) if location.file else None
    rules = settings.all_tasks() if settings else {}
    with location.buffer() as buffer, _bar("load") as report:
        check_shards(read_index(Path(folder))[0].tasks, rules)
        loaded = buffer.restore(Path(folder), rules=rules, report=report)
    for task in sorted(rules.keys() - loaded.tasks.keys()):
        click.echo(f"warning: task {task!r} is not in {folder}: it starts from the beginning", err=True)
    first, last = loaded.resume_steps
    click.echo(f"restored {count(loaded.groups, 'group')} of run {loaded.run!r}, saved {loaded.saved_at}")
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
