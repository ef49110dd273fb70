"""`rollq status`: the progress of a run."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.cli.options import run_options

if TYPE_CHECKING:
    from rollq.cli.run_location import RunLocation


@click.command()
@run_options
@click.option("--steps", "by_step", is_flag=True, help="Show reward, lengths, entropy and more by train step.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def status(file: Path | None, url: str | None, run_name: str | None, by_step: bool, as_json: bool) -> None:
    """Show whether a run makes progress and what blocks it, then its groups, rates, trainer and workers. Changes
    nothing.

    --steps works even after the server or the run is gone, if FILE names the trainer's folder.

    \b
    Example:
      rollq status rollq.toml
      rollq status rollq.toml --steps
      rollq status --url redis://127.0.0.1:6379/0 --run sums --json
    """
    from rollq.cli.run_location import find_run
    from rollq.monitor.status import text
    from rollq.monitor.status.read import read_status

    location = find_run(file, url, run_name)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else text.WIDTH
    if by_step:
        click.echo(_by_step(location, as_json=as_json, width=width))
        return
    with location.without_payloads() as buffer:
        run = read_status(buffer, location.queue())
    click.echo(text.as_json(run) if as_json else text.as_table(run, width))
    if not as_json:
        click.echo("\nreward, lengths and more by train step: rollq status --steps")


def _by_step(location: "RunLocation", *, as_json: bool, width: int) -> str:
    """A run's curves. Raises the exceptions of `CurveFinder.of`."""
    import orjson

    from rollq.cli.run_reader import CurveFinder, RunReader
    from rollq.monitor.dashboard.curves import columns
    from rollq.monitor.report.step_table import as_step_table

    with RunReader(location) as reader:
        curves = CurveFinder(location, reader.call).of(location.run)
    return orjson.dumps(columns(curves)).decode() if as_json else as_step_table(curves, width)
