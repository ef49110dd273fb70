"""Commands on whole runs: `rollq runs list`, `delete`, `recover` and `acl`."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.errors import ConfigError
from rollq.cli.commands.access import acl
from rollq.cli.commands.recover import recover
from rollq.cli.options import DEFAULT_FILE, file_and, file_argument, url_option

if TYPE_CHECKING:
    from rollq.buffer.calls.runs import Report, RunSummary
    from rollq.cli.run_location import RunLocation

QUIET_S = 1.0
"""Seconds after which a progress bar appears."""


@click.group()
def runs() -> None:
    """List, delete and recover runs, and restrict the rights of a run's roles.

    \b
    Example:
      rollq runs list rollq.toml
      rollq runs delete rollq.toml old-run --yes
      rollq runs recover rollq.toml --weights backups/step-30
      rollq runs acl rollq.toml --passwords passwords > rollq.acl
    """


runs.add_command(recover)
runs.add_command(acl)


@runs.command("list", short_help="List the runs of a server.")
@file_argument
@url_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, for programs.")
def list_runs(file: Path | None, url: str | None, as_json: bool) -> None:
    """List the runs on the server of FILE (rollq.toml) or --url: their size, their age, and who uses them.

    Looks at every key of the server, about a second per million; on a server with users, only admin may.

    \b
    Example:
      rollq runs list
      rollq runs list --url redis://127.0.0.1:6379/0
    """
    import orjson

    from rollq.buffer.calls.runs import find_runs
    from rollq.buffer.store.connection import Patience
    from rollq.buffer.store.servers import open_servers

    location = _location(file, url, "any")
    servers = open_servers(location.buffer_url, location.password)
    try:
        with _bar("look", " keys") as report:
            summaries = find_runs(servers, Patience(), report)
    finally:
        servers.close()
    for line in [orjson.dumps(asdict(run)).decode() for run in summaries] if as_json else _table(summaries):
        click.echo(line)


@runs.command(short_help="Delete a run.")
@file_and(run="RUN")
@url_option
@click.option("--yes", is_flag=True, help="Delete the run; without this, only show it.")
def delete(file: Path | None, run: str, url: str | None, yes: bool) -> None:
    """Delete RUN from the server of FILE (rollq.toml) or --url: its keys, its payloads, its tickets.

    Refuses to delete a run in use. If this command is interrupted, repeat it; no role can use the run until then.
    Checkpoints, weights and archives in folders stay.

    \b
    Example:
      rollq runs delete rollq.toml old-run
      rollq runs delete old-run --url redis://127.0.0.1:6379/0 --yes
    """
    from rollq.buffer.calls.runs import GONE, summarize

    location = _location(file, url, run)
    with location.buffer() as buffer:
        summary = summarize(buffer)
        if summary.state == GONE:
            raise ConfigError(f"run {run!r} is not on this server: `rollq runs list` shows the runs that are")
        click.echo("\n".join(_table([summary])))
        if summary.unarchived:
            click.echo(
                f"{summary.unarchived:,} groups are not in the archive yet and would be lost: write them first with "
                "`rollq archive --finish`"
            )
        if not yes:
            click.echo("nothing was deleted; add --yes to delete this run, its payloads and its tickets")
            return
        queue = location.queue()
        with closing(queue.connection), _bar("delete", " keys") as report:
            buffer.delete_run(queue, report)
    click.echo(f"deleted run {run!r}")


def _location(file: Path | None, url: str | None, run: str) -> "RunLocation":
    from rollq.cli.run_location import RunLocation
    from rollq.cli.settings.file import load_settings

    if url and file:
        raise ConfigError("give either FILE (rollq.toml) or --url")
    if url:
        return RunLocation.at(url, run)
    return replace(RunLocation.from_settings(load_settings(file or DEFAULT_FILE)), run=run)


def _table(summaries: "Sequence[RunSummary]") -> list[str]:
    from rollq.monitor.text.tables import aligned
    from rollq.monitor.text.units import in_words

    if not summaries:
        return ["no runs"]
    header = ("run", "tasks", "groups", "samples take", "age", "keys", "in use by")
    rows = [
        (
            run.run,
            ",".join(run.tasks),
            f"{run.groups:,}",
            in_words(run.size_bytes),
            "-" if run.age_s is None else _age(run.age_s),
            f"{run.keys:,}" if run.keys else "-",
            run.state or "; ".join(run.roles) or "nobody",
        )
        for run in summaries
    ]
    return aligned([header, *rows], left=(0, 1, 6))


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@contextmanager
def _bar(verb: str, unit: str) -> "Iterator[Report]":
    from tqdm import tqdm

    with tqdm(desc=verb, unit=unit, delay=QUIET_S) as bar:

        def report(done: int) -> None:
            bar.update(done - bar.n)

        yield report
