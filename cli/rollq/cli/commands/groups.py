"""`rollq groups`: moves single groups, or all groups that a query finds. Also registers other commands on groups."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.errors import ConfigError
from rollq.cli.commands.exclude import exclude
from rollq.cli.commands.query import parse_query_text
from rollq.cli.commands.query import query as query_command
from rollq.cli.commands.show import show
from rollq.cli.options import connection_options, file_and

if TYPE_CHECKING:
    from rollq.buffer.buffer import Buffer
    from rollq.buffer.calls.orders import GroupOrder
    from rollq.cli.groups.orders import Found, Outcome

HELP = """{effect}

Asks before it changes anything, unless --yes; if nobody can answer, it changes nothing, and the exit status is 1. A
group whose status changes in between is left alone. With --yes, the exit status is 1 if a named group was not moved.

\b
Example:
  rollq groups {order} rollq.toml math/12 math/13
  rollq groups {order} --query '{{"task": "math", "status": "completed"}}' --dry-run
"""


@click.group()
def groups() -> None:
    """Find and show groups; sample them again, keep them from the trainer, or drop them; exclude rows.

    \b
    Example:
      rollq groups query rollq.toml '{"step": 3, "sample": {"reward": 0}}'
      rollq groups show rollq.toml math 12
      rollq groups requeue rollq.toml math/12
      rollq groups drop --query '{"status": "failed"}' --dry-run
      rollq groups exclude rollq.toml math 17
    """


def _add(order: str, short_help: str, effect: str) -> None:
    """Add an order's command."""

    @groups.command(order, short_help=short_help, help=HELP.format(order=order, effect=effect))
    @file_and(names="[TASK/NUMBER]...")
    @connection_options
    @click.option(
        "--query", help="The groups that this query finds, as in `rollq groups query`; at most 1,000 at a time."
    )
    @click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
    @click.option("--yes", is_flag=True, help="Do not ask.")
    def command(
        file: Path | None,
        names: tuple[str, ...],
        url: str | None,
        run_name: str | None,
        query: str | None,
        dry_run: bool,
        yes: bool,
    ) -> None:
        from rollq.buffer.calls.orders import GroupOrder
        from rollq.buffer.query.language import parse_query
        from rollq.cli.groups.orders import named_groups, queried_groups
        from rollq.cli.run_location import find_run

        if bool(names) == (query is not None):
            raise ConfigError("say which groups: give either TASK/NUMBER, such as math/12, or --query")
        conditions = None if query is None else parse_query_text(query)
        needs_samples = query is not None and parse_query(conditions).searches_texts
        location = find_run(file, url, run_name)
        with location.buffer() if needs_samples else location.without_payloads() as buffer:
            found = named_groups(buffer, names) if names else queried_groups(buffer, conditions)
            are_moved = _order(buffer, GroupOrder(order), found, dry_run=dry_run, yes=yes)
        if names and yes and not dry_run and not are_moved:
            sys.exit(1)


_add(
    "requeue",
    "Have groups sampled again.",
    "Throw away the samples of groups that are completed, filtered or failed, and have their prompts sampled again.",
)
_add(
    "quarantine",
    "Withhold groups from the trainer.",
    "Withhold running or completed groups from the trainer: they fail, and stay for inspection.",
)
_add("drop", "Remove groups.", "Remove groups with their samples, unless a batch has them.")
groups.add_command(query_command)
groups.add_command(show)
groups.add_command(exclude)


def _order(buffer: "Buffer", order: "GroupOrder", found: "Found", *, dry_run: bool, yes: bool) -> bool:
    """Give an order once it is confirmed; returns whether the order moved each group, or would move it.

    Exits with 1 if nobody can confirm it.
    """
    from rollq.cli.groups.orders import MOST_GROUPS, effect_of, order_groups

    for name in found.missing:
        click.echo(f"{name}: it is not in the buffer")
    looked = order_groups(buffer, order, found.groups, dry_run=True)
    _tell_left(looked)
    click.echo(effect_of(order, looked.moved))
    if found.more:
        click.echo(f"and more: one order moves at most {MOST_GROUPS:,} groups; repeat it for the rest")
    are_moved = not any((found.missing, looked.left))
    if dry_run or not looked.moved:
        click.echo("nothing was changed")
    elif yes or _is_confirmed():
        are_moved &= _give(buffer, order, found, looked)
    return are_moved


def _is_confirmed() -> bool:
    """Ask whether to continue. Exits with 1 if nobody can answer."""
    can_ask = sys.stdin.isatty()
    if can_ask and click.confirm("Continue?"):
        return True
    if can_ask:
        click.echo("nothing was changed")
        return False
    click.echo("nothing was changed; --yes makes the change without asking")
    sys.exit(1)


def _give(buffer: "Buffer", order: "GroupOrder", found: "Found", looked: "Outcome") -> bool:
    """Give an order for the groups that it would move; returns whether it moved every such group."""
    from rollq.cli.groups.orders import effect_of, name_of, order_groups

    chosen = [group for group in found.groups if name_of(group) not in looked.left]
    done = order_groups(buffer, order, chosen, dry_run=False)
    _tell_left(done)
    skipped = f"; {len(done.left):,} skipped" if done.left else ""
    click.echo(f"done: {effect_of(order, done.moved)}{skipped}")
    return not done.left


def _tell_left(ordered: "Outcome") -> None:
    from rollq.cli.groups.orders import left_lines

    for line in left_lines(ordered):
        click.echo(line)
