"""Looks at a run from outside: `rollq status` and `rollq rq-info`."""

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
