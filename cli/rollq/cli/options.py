"""Arguments and options that several commands share.

Commands take the settings file in the same way: FILE is the first argument, by default the rollq.toml of the working
directory. If other arguments follow, a first word that ends in .toml is FILE.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rollq.buffer.errors import ConfigError

DEFAULT_FILE = Path("rollq.toml")
SUFFIX = ".toml"

Command = Callable[..., None]


def _warn_of_password(context: click.Context, option: click.Parameter, url: str | None) -> str | None:
    from rollq.buffer.store.redis_url import has_password

    if url and has_password(url):
        click.echo(
            "warning: --url contains a password, which every user of this machine can see in `ps`: set it in "
            "ROLLQ_REDIS_PASSWORD, or name a file that contains it in ROLLQ_REDIS_PASSWORD_FILE",
            err=True,
        )
    return url


def _existing(context: click.Context, argument: click.Parameter, file: Path | None) -> Path:
    if file is None and not DEFAULT_FILE.exists():
        raise ConfigError(f"there is no {DEFAULT_FILE} in this folder: name the file of the run")
    return file or DEFAULT_FILE


url_option: Callable[[Command], Command] = click.option(
    "--url",
    callback=_warn_of_password,
    help="URL of the server, instead of FILE; its password belongs in ROLLQ_REDIS_PASSWORD, or in a file that "
    "ROLLQ_REDIS_PASSWORD_FILE names.",
)
run_option: Callable[[Command], Command] = click.option("--run", "run_name", help="Name of the run, with --url.")
allowed_host_option: Callable[[Command], Command] = click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Another name or address by which browsers and scrapers reach it; 127.0.0.1, localhost and --host always "
    "work. Repeatable.",
)
file_argument: Callable[[Command], Command] = click.argument("file", type=click.Path(path_type=Path), required=False)
settings_file: Callable[[Command], Command] = click.argument(
    "file", type=click.Path(path_type=Path), required=False, callback=_existing
)
"""FILE for a command that has no --url."""


class _Words(click.Argument):
    """FILE and the arguments after it, which the command gets as `file` and by their names."""

    def __init__(self, declarations: list[str], *, following: dict[str, str], needs_file: bool, **options: Any) -> None:
        usage = " ".join(("[FILE]", *following.values()))
        super().__init__(declarations, nargs=-1, metavar=usage, expose_value=False, callback=self._name, **options)
        self._following, self._needs_file = following, needs_file

    def _name(self, context: click.Context, argument: click.Parameter, given: tuple[str, ...]) -> None:
        words = list(given)
        file = Path(words.pop(0)) if words and words[0].endswith(SUFFIX) else None
        late = next((word for word in words if word.endswith(SUFFIX)), None)
        if late is not None:
            raise click.UsageError(f"{late!r}: FILE is the first argument: {_usage(context, self)}", context)
        for name, usage in self._following.items():
            if usage.endswith("..."):
                context.params[name], words = tuple(words), []
            elif not words and not usage.startswith("["):
                raise click.UsageError(f"Missing argument {usage!r}.", context)
            else:
                context.params[name] = words.pop(0) if words else None
        if words:
            raise click.UsageError(f"Got unexpected extra argument ({words[0]}); FILE ends in {SUFFIX}", context)
        context.params["file"] = _existing(context, argument, file) if self._needs_file else file


def _usage(context: click.Context, argument: click.Argument) -> str:
    return f"`{context.command_path} {argument.metavar}`"


def file_and(*, needs_file: bool = False, **following: str) -> Callable[[Command], Command]:
    """Add FILE and the following arguments: parameter -> its form in the usage line, as in "TASK", "[GROUP]" or
    "[RULE=VALUE]...". With `needs_file`, the command has no --url."""
    argument: Callable[[Command], Command] = click.argument(
        "words", cls=_Words, following=following, needs_file=needs_file
    )
    return argument


def run_options(command: Command) -> Command:
    """Add FILE, --url and --run, which `rollq.cli.run_location.find_run` understands."""
    return file_argument(connection_options(command))


def connection_options(command: Command) -> Command:
    """Add --url and --run, beside FILE."""
    return url_option(run_option(command))
