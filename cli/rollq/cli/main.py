"""The `rollq` command. Commands are imported when they are asked for, so that `rollq --help` is quick."""

import difflib
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import click

from rollq.buffer.errors import ConfigError, RollqError

COMMANDS = {
    "demo": "rollq.cli.demo",
    "redis": "rollq.cli.redis_server",
    "produce": "rollq.cli.roles",
    "work": "rollq.cli.roles",
    "train": "rollq.cli.roles",
    "status": "rollq.cli.views",
    "rq-info": "rollq.cli.views",
}
"""Name of a command -> module that holds it, under the same name with underscores."""


class Commands(click.Group):
    """Commands by name, each from a module of its own; rollq's errors end as one line and an exit status."""

    def list_commands(self, context: click.Context) -> list[str]:
        return [name for name, module in COMMANDS.items() if find_spec(module)]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(context):
            return None
        command = getattr(import_module(COMMANDS[name]), name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(context, args[0]) is None:
            close = difflib.get_close_matches(args[0], self.list_commands(context), n=1)
            hint = f"Did you mean {close[0]!r}?" if close else "See `rollq --help`."
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", context)
        return super().resolve_command(context, args)

    def invoke(self, context: click.Context) -> Any:
        """Exit status 2: the settings or arguments are wrong; 1: something went wrong on the way."""
        try:
            return super().invoke(context)
        except RollqError as error:
            click.echo(f"error: {error}", err=True)
            context.exit(2 if isinstance(error, ConfigError) else 1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="rollq", message="%(prog)s %(version)s")
def main() -> None:
    """Rollout queue and replay buffer for RL post-training of language models.

    Every role is a process of its own; Redis is all they share. On several terminals or machines:

    \b
      rollq redis --dir data            a server, unless you have one
      rollq produce rollq.toml          prompts to jobs
      rollq work rollq.toml             jobs to groups, one per GPU
      rollq train rollq.toml            groups to new weights
      rollq status rollq.toml           how far everything is
    """


if __name__ == "__main__":
    main()
