"""Commands that write groups to files: `rollq archive` and `rollq export`."""

import logging
from pathlib import Path

import click

from rollq.buffer.errors import ConfigError
from rollq.cli.logs import log_options
from rollq.cli.options import connection_options, file_and, settings_file
from rollq.cli.signals import stop_on_signals

log = logging.getLogger(__name__)


@click.command()
@settings_file
@click.option(
    "--finish", is_flag=True, help="The run is over: archive everything that is left, for audit too, and exit."
)
@log_options
def archive(file: Path, finish: bool) -> None:
    """Write every trained or dropped group to Parquet files at the url of [archive], until stopped.

    Nothing leaves the buffer before it is in the archive. With --finish, the exit status is 1 while trained groups wait
    for a checkpoint. Any number of archivers may run; killing one never duplicates a group. Without an archiver, the
    trainer waits after max_uncheckpointed_steps.

    \b
    Example:
      rollq archive rollq.toml
    """
    from rollq.buffer.archive.archiver import Archiver, wait_for_run
    from rollq.cli.run_location import RunLocation
    from rollq.cli.settings.file import load_settings

    settings = load_settings(file)
    if settings.archive.url is None:
        raise ConfigError(f"{file}: `rollq archive` needs url in [archive]")
    stop = stop_on_signals()
    with RunLocation.from_settings(settings).buffer(stop) as buffer:
        if not finish:
            wait_for_run(buffer, stop)
            if stop.is_set():
                return
        archiver = Archiver(buffer, settings.archive.url)
        log.info("archiving run %r in %s", settings.run, settings.archive.url)
        archiver.finish(stop) if finish else archiver.run(stop)
    log.info("stopped")


@click.command()
@file_and(query="QUERY")
@connection_options
@click.option("--archive", "archive_url", help="Read the archive at this folder or s3:// URL, instead of the buffer.")
@click.option("--format", "form", type=click.Choice(["jsonl", "parquet"]), default="jsonl", show_default=True)
@click.option("--to", "path", type=click.Path(path_type=Path), required=True, help="The file to write; must not exist.")
def export(
    query: str, file: Path | None, url: str | None, run_name: str | None, archive_url: str | None, form: str, path: Path
) -> None:
    """Write the groups that match QUERY to a file, with all their samples, in the columns of the archive.

    QUERY is as in `rollq groups query`, '{}' for every group. With --archive, no server is needed. The status of
    trained groups is then archived; of others it is failed, filtered, expired or leaving.

    \b
    Example:
      rollq export rollq.toml '{"status": "failed"}' --to failed.jsonl
      rollq export '{"task": "sum"}' --archive /mnt/shared/archive/sums --format parquet --to sum.parquet
    """
    from rollq.buffer.archive.export import export as write
    from rollq.buffer.archive.export import groups_in
    from rollq.buffer.archive.reader import Archive
    from rollq.cli.commands.query import parse_query_text
    from rollq.cli.run_location import find_run

    conditions = parse_query_text(query)
    if archive_url is not None:
        if file or url or run_name:
            raise ConfigError("--archive: give either an archive, or a run by FILE or --url and --run")
        count = write(Archive(archive_url).groups(conditions), path, form)
    else:
        location = find_run(file, url, run_name)
        with location.buffer() as buffer:
            count = write(groups_in(buffer, conditions), path, form)
    click.echo(f"wrote {count} groups to {path}")
