"""`rollq groups show`: shows single groups."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.common.whole_numbers import MOST_DIGITS, whole_number
from rollq.buffer.errors import ConfigError, RollqError
from rollq.buffer.values.rollouts import Status
from rollq.cli.options import connection_options, file_and

if TYPE_CHECKING:
    from rollq.buffer.buffer import Buffer
    from rollq.buffer.calls.group_details import FoundGroup
    from rollq.buffer.calls.replies.tasks import Counts
    from rollq.cli.groups.left import LeftGroups

WIDTH = 100
"""The width, in columns, of output that does not go to a terminal."""


@click.command(short_help="Show the life of a group and its samples.")
@file_and(task="TASK", group="[GROUP]")
@connection_options
@click.option("--step", type=click.IntRange(1), help="The groups in the batch of this train step.")
@click.option(
    "--last",
    type=click.Choice([status.value for status in Status]),
    metavar="STATUS",
    help="The newest group with this status.",
)
@click.option("--full", is_flag=True, help="Show texts in full.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per group, with all tokens, for programs.")
def show(
    file: Path | None,
    task: str,
    group: str | None,
    url: str | None,
    run_name: str | None,
    step: int | None,
    last: str | None,
    full: bool,
    as_json: bool,
) -> None:
    """Show the life of a group and its samples. Changes nothing.

    GROUP is the number of a group, as `rollq groups query` prints it. If the task has shards, TASK is the name of a
    shard. Groups that have left the buffer are shown from the archive, if FILE has url in [archive].

    \b
    Example:
      rollq groups show math 12
      rollq groups show rollq.toml math --last failed
      rollq groups show math --step 3 --url redis://127.0.0.1:6379/0 --run sums
    """
    from rollq.cli.groups.left import LeftGroups
    from rollq.cli.run_location import find_run

    group_id = None if group is None else _number(group)
    if (group_id is not None) + (step is not None) + (last is not None) != 1:
        raise ConfigError("say which groups to show: give one of GROUP, --step and --last")
    location = find_run(file, url, run_name)
    with location.to_look_at() as buffer:
        names, left = _tasks(buffer, task), LeftGroups(buffer, location.archive_url)
        if step is not None:
            groups = _of_step(buffer, left, names, step)
        elif last is not None:
            groups = _newest(buffer, names, Status(last))
        else:
            groups = _numbered(buffer, left, names, group_id or 0)
    _print(groups, full=full, as_json=as_json, as_rows=step is not None and not full)


def _number(group: str) -> int:
    number = whole_number(group)
    if number is None:
        raise ConfigError(f"GROUP {group[:20]!r}: must be a number of at most {MOST_DIGITS} digits")
    return number


def _tasks(buffer: "Buffer", task: str) -> list[str]:
    """The task or its shards. Raises `ConfigError` if there is none."""
    from rollq.buffer.rules.shards import shards_among

    tasks = buffer.tasks()
    names = [task] if task in tasks else shards_among(tasks, task)
    if not names:
        raise ConfigError(f"TASK {task!r}: the run has {', '.join(tasks) or 'no tasks'}")
    return names


def _numbered(buffer: "Buffer", left: "LeftGroups", tasks: Sequence[str], group_id: int) -> "list[FoundGroup]":
    if len(tasks) > 1:
        raise ConfigError(f"each shard has a group {group_id}: give the shard as TASK: {', '.join(tasks)}")
    if groups := buffer.look(tasks[0], [group_id]):
        return groups
    counts = buffer.counts(tasks[0])
    admitted = int(counts.progress.get("admitted", 0))
    if not 1 <= group_id <= admitted:
        raise RollqError(f"group {group_id} of {tasks[0]} was never admitted: the task has had groups 1 to {admitted}")
    if groups := left.look(tasks[0], group_id):
        return groups
    raise RollqError(
        f"group {group_id} of {tasks[0]} has left the buffer: it was trained or dropped (so far: "
        f"{_dropped(counts)}){left.where}"
    )


def _dropped(counts: "Counts") -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.dropped.items() if count) or "none"


def _newest(buffer: "Buffer", tasks: Sequence[str], status: Status) -> "list[FoundGroup]":
    newest = {task: buffer.newest(task, status) for task in tasks}
    groups = [group for task, last in newest.items() if last is not None for group in buffer.look(task, [last])]
    if not groups:
        raise RollqError(f"no group of {', '.join(tasks)} is {status} now: `rollq status` counts them by status")
    return [max(groups, key=lambda group: int(group.fields.get("admitted_ms", 0)))]


def _of_step(buffer: "Buffer", left: "LeftGroups", tasks: Sequence[str], step: int) -> "list[FoundGroup]":
    groups = [group for task in tasks for group in buffer.look(task, buffer.groups_of_step(task, step))]
    if groups := groups or left.of_step(tasks, step):
        return groups
    claimed = max(buffer.clock(task).claimed_step for task in tasks)
    if step > claimed:
        raise RollqError(f"step {step} has not been claimed yet: the last claimed step is {claimed}")
    raise RollqError(
        f"the batch of step {step} has left the buffer: batches stay until a checkpoint covers them, and with "
        f'resume = "fresh" until they are trained{left.where}'
    )


def _print(groups: "Sequence[FoundGroup]", *, full: bool, as_json: bool, as_rows: bool) -> None:
    from rollq.monitor.groups.text import as_json as json_of
    from rollq.monitor.groups.text import as_list, as_text
    from rollq.monitor.groups.view import view_of

    width = shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
    if as_json:
        for group in groups:
            click.echo(json_of(view_of(group)))
    elif as_rows:
        click.echo(as_list(groups, width=width))
    else:
        click.echo("\n\n".join(as_text(view_of(group), width=width, full=full) for group in groups))
