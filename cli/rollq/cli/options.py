"""Arguments that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_RUN_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.argument("file", type=click.Path(path_type=Path), required=False),
    click.option("--url", help="URL of the server, instead of FILE."),
    click.option("--run", "run_name", help="Name of the run, with --url."),
)


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add FILE, --url and --run, which `rollq.cli.run_location.find_run` understands."""
    for option in reversed(_RUN_OPTIONS):
        command = option(command)
    return command
