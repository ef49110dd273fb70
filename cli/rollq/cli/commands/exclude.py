"""`rollq groups exclude`: excludes rows of a task's prompts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.common.counting import count
from rollq.buffer.common.whole_numbers import whole_number
from rollq.buffer.errors import ConfigError
from rollq.cli.options import connection_options, file_and

if TYPE_CHECKING:
    from rollq.buffer.buffer import Buffer


@click.command(short_help="Take rows out of a task's prompts for good.")
@file_and(task="TASK", rows="[ROW]...")
@connection_options
@click.option("--undo", is_flag=True, help="Take the rows in again.")
def exclude(
    file: Path | None, task: str, rows: tuple[str, ...], url: str | None, run_name: str | None, undo: bool
) -> None:
    """Take rows out of the prompts of TASK for good; without ROW, list the excluded rows.

    ROW is a number from 0, as `rollq groups show` prints the row of a group. Producers skip it at once, and in every
    later pass. Its waiting groups are dropped; groups that a worker or the trainer has, and finished groups, stay.
    `rollq set TASK` shows the change. It counts for these prompts only: if their file changes, none of its rows is
    excluded.

    \b
    Example:
      rollq groups exclude rollq.toml math 17 203
      rollq groups exclude math 17 --undo
      rollq groups exclude math
    """
    from rollq.cli.run_location import find_run
    from rollq.cli.steering import shards_of

    numbers = list(map(_number, dict.fromkeys(rows)))
    if undo and not rows:
        raise ConfigError("--undo: name the rows, as `rollq groups exclude TASK` lists them")
    with find_run(file, url, run_name).without_payloads() as buffer:
        shards = shards_of(buffer, buffer.tasks(), task)
        if not rows:
            _list(buffer, task, shards)
            return
        for shard, some in _by_shard(shards, numbers).items():
            changed = buffer.exclude_rows(shard, some, undo=undo)
            dropped = 0 if undo else buffer.drop_waiting(shard, some)
            waiting = f"; {count(dropped, 'waiting group')} dropped" if dropped else ""
            click.echo(f"task {shard}: {_said(some, changed, undo=undo)}{waiting}")


def _number(row: str) -> int:
    if (number := whole_number(row)) is None:
        raise ConfigError(f"ROW {row[:20]!r}: must be the number of a row, as `rollq groups show` prints it")
    return number


def _by_shard(shards: Sequence[str], rows: Sequence[int]) -> Mapping[str, list[int]]:
    """Each shard's rows. A row belongs to one shard."""
    from rollq.buffer.rules.shards import shard_of

    if len(shards) == 1:
        return {shards[0]: list(rows)}
    numbered = {shard_of(shard).number: shard for shard in shards}
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(numbered[row % len(shards) + 1], []).append(row)
    return found


def _said(rows: Sequence[int], changed: Sequence[int], *, undo: bool) -> str:
    state, before = ("taken in again", "not excluded before") if undo else ("excluded", "excluded before")
    same = [row for row in rows if row not in changed]
    parts = [f"{_shown(changed)} {state}"] if changed else []
    return "; ".join(parts + ([f"{_shown(same)} {before}"] if same else []))


def _shown(rows: Sequence[int]) -> str:
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows))}"


def _list(buffer: "Buffer", task: str, shards: Sequence[str]) -> None:
    found = [buffer.excluded_rows(shard) for shard in shards]
    rows = sorted(row for each in found for row in each.rows)
    click.echo(f"task {task}: {f'{len(rows):,} excluded: {_shown(rows)}' if rows else 'no row is excluded'}")
    if others := sum(each.of_another_file for each in found):
        click.echo(f"task {task}: {count(others, 'row')} of other prompts excluded before, without effect now")
