"""The command `rollq top`."""

import sys
from pathlib import Path

import click

from rollq.buffer.errors import ConfigError
from rollq.cli.options import run_options


@click.command()
@run_options
def top(file: Path | None, url: str | None, run_name: str | None) -> None:
    """Show a run live, as `rollq status` does once, and steer it by keyboard. ? shows the keys.

    \b
    Example:
      rollq top rollq.toml
      rollq top --url redis://127.0.0.1:6379/0 --run sums
    """
    try:
        from rollq.cli.top.app import Top
    except ModuleNotFoundError as error:
        raise ConfigError(f"`rollq top` needs the package {error.name!r}: pip install 'rollq[top]'") from error
    from rollq.cli.run_location import find_run
    from rollq.cli.run_reader import RunReader
    from rollq.cli.top.feed import Feed

    if not sys.stdout.isatty():
        raise ConfigError("`rollq top` needs a terminal: use `rollq status` elsewhere")
    location = find_run(file, url, run_name)
    with Feed(RunReader(location)) as feed:
        Top(location.run, feed, lambda: RunReader(location)).run()
