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
    from rollq.cli.run_location import find_run
    from rollq.monitor import status as view

    place = find_run(file, url, run_name)
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
    """Find groups. QUERY is a JSON object; FILE is rollq.toml, by default the one in this folder. Changes nothing.

    A field and a value: they are equal. A field and operators: all of them hold. Several fields: all hold. Nothing, {}:
    every group.

    \b
    Fields:
      task        name of the task
      uid         number of the group in its task
      arrival     the same number: groups are numbered as they arrive
      status      pending running completed gathered cooling aborted expired
                  filtered failed claimed archived
      staleness   of its oldest token, at the step that is trained next
      reward      mean of its samples; null before they are judged
      tries       attempts since it was last interrupted or expired

    \b
    Operators of a field:
      $eq $ne             '{"task": {"$ne": "math"}}'
      $gt $gte $lt $lte   '{"reward": {"$gt": 0, "$lt": 1}}'
      $in $not_in         '{"status": {"$in": ["failed", "filtered"]}}'
      $between            '{"staleness": {"$between": [1, 2]}}', both included
    Operators between queries:
      $or                 '{"$or": [{"tries": {"$gte": 2}}, {"status": "aborted"}]}'
      $and                '{"$and": [{"status": "completed"}, {"staleness": {"$gte": 1}}]}'

    \b
    Example:
      rollq query '{"status": "completed", "staleness": {"$gte": 1}}'
      rollq query '{"status": "failed", "task": "math"}' rollq.toml --json
      rollq query '{"reward": null}' --url redis://127.0.0.1:6379/0 --run sums --count
    """
    import orjson

    from rollq.buffer.errors import ConfigError
    from rollq.cli.run_location import find_run
    from rollq.monitor.queries import as_lines, as_table

    try:
        asked = orjson.loads(query)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"QUERY {query!r}: not JSON: {error}") from error
    place = find_run(file or (None if url or run_name else Path("rollq.toml")), url, run_name)
    with place.buffer() as buffer:
        found = buffer.query(asked, limit=None if only_count else limit + 1)
    if only_count:
        click.echo(len(found))
    elif as_json:
        for line in as_lines(found[:limit]):
            click.echo(line)
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
    from rollq.cli.run_location import find_run
    from rollq.monitor.rq_info import rq_lines

    click.echo("\n".join(rq_lines(find_run(file, url, run_name).queue())))
