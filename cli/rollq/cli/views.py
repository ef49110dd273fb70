"""Looks at a run from outside: `rollq status`, `rollq query` and `rollq rq-info`."""

from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--url", help="URL of the server, instead of FILE.")
@click.option("--run", "run_name", help="Name of the run, with --url.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def status(file: Path | None, url: str | None, run_name: str | None, as_json: bool) -> None:
    """Show how far a run is: groups per status, weights, workers. Changes nothing.

    \b
    Example:
      rollq status rollq.toml
      rollq status --url redis://127.0.0.1:6379/0 --run sums --json
    """
    from rollq.cli.setup import find_place
    from rollq.monitor import status as view

    place = find_place(file, url, run_name)
    with place.buffer() as buffer:
        found = view.read_status(buffer, place.queue())
    click.echo(view.as_json(found) if as_json else view.as_table(found))


@click.command()
@click.argument("query")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--url", help="URL of the server, instead of FILE.")
@click.option("--run", "run_name", help="Name of the run, with --url.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Most groups that are shown.")
@click.option("--count", "only_count", is_flag=True, help="Only how many there are, without a limit.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, for programs.")
def query(
    query: str, file: Path | None, url: str | None, run_name: str | None, limit: int, only_count: bool, as_json: bool
) -> None:
    """Find groups. QUERY is a JSON object; FILE is rollq.toml, by default the one in this folder.

    \b
    Fields:     uid task status staleness arrival reward tries
    Operators:  $eq $ne $gt $gte $lt $lte $in $not_in $between, and $and $or between queries

    \b
    Example:
      rollq query '{"status": "completed", "staleness": {"$gte": 1}}'
      rollq query '{"status": {"$in": ["failed", "filtered"]}, "task": "math"}' rollq.toml
      rollq query '{"$or": [{"reward": {"$between": [0.2, 0.8]}}, {"tries": {"$gt": 2}}]}' --count
    """
    import orjson

    from rollq.buffer.errors import ConfigError
    from rollq.cli.setup import find_place
    from rollq.monitor.queries import as_lines, as_table

    try:
        asked = orjson.loads(query)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"QUERY {query!r}: not JSON: {error}") from error
    if file is None and not url and not run_name:
        file = Path("rollq.toml")
    with find_place(file, url, run_name).buffer() as buffer:
        found = buffer.query(asked, limit=None if only_count else limit + 1)
    if only_count:
        click.echo(len(found))
    elif as_json:
        click.echo("\n".join(as_lines(found[:limit])))
    else:
        click.echo(as_table(found[:limit], more=len(found) > limit))


@click.command("rq-info")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--url", help="URL of the server, instead of FILE.")
@click.option("--run", "run_name", help="Name of the run, with --url.")
def rq_info(file: Path | None, url: str | None, run_name: str | None) -> None:
    """Show the run's queue and workers as RQ has them, without loading what others may have put there.

    \b
    Example:
      rollq rq-info rollq.toml
    """
    from rollq.cli.setup import find_place
    from rollq.monitor.rq_info import rq_lines

    click.echo("\n".join(rq_lines(find_place(file, url, run_name).queue())))
