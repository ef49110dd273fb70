"""Arguments that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def _warn_of_password(context: click.Context, option: click.Parameter, url: str | None) -> str | None:
    from rollq.buffer.store.redis_url import has_password

    if url and has_password(url):
        click.echo(
            "warning: --url contains a password, which every user of this machine can see in `ps`: set it in "
            "ROLLQ_REDIS_PASSWORD, or name a file that contains it in ROLLQ_REDIS_PASSWORD_FILE",
            err=True,
        )
    return url


DEFAULT_FILE = Path("rollq.toml")

url_option: Callable[[Any], Any] = click.option(
    "--url",
    callback=_warn_of_password,
    help="URL of the server, instead of FILE; its password belongs in ROLLQ_REDIS_PASSWORD or _PASSWORD_FILE.",
)
url_options = (url_option, click.option("--run", "run_name", help="Name of the run, with --url."))
allowed_host_option: Callable[[Any], Any] = click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Name or address by which browsers and scrapers reach it, beside 127.0.0.1, localhost and --host; repeatable.",
)
_RUN_OPTIONS = (click.argument("file", type=click.Path(path_type=Path), required=False), *url_options)


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add FILE, --url and --run, which `rollq.cli.run_location.find_run` understands."""
    for option in reversed(_RUN_OPTIONS):
        command = option(command)
    return command
