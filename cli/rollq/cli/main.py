"""The `rollq` command. Each command is imported when it runs, and imports other modules inside its function, so that
`rollq --help` is quick."""

import difflib
from importlib import import_module
from typing import Any

import click

from rollq.buffer.errors import ConfigError, InvalidPrompt, RollqError, RunMismatch

GROUPS = {
    "Run": {
        "init": ("rollq.cli.demo.init", "Write example files for a first run, to be replaced by yours."),
        "up": ("rollq.cli.up.command", "Run all roles of a settings file on this machine."),
        "demo": ("rollq.cli.demo.command", "Train a tiny model on this machine, all roles in one command."),
        "env": ("rollq.cli.commands.env", "List, check, try and export environments."),
        "try": ("rollq.cli.commands.try_", "Try a few rows of a task: prompts, judge and samples."),
        "settings": ("rollq.cli.commands.settings", "Show the keys of rollq.toml, with meanings and defaults."),
        "redis": ("rollq.cli.commands.redis", "Run a Redis-compatible server on this machine."),
        "produce": ("rollq.cli.commands.roles", "Schedule prompts."),
        "work": ("rollq.cli.commands.roles", "Generate and judge groups."),
        "train": ("rollq.cli.commands.roles", "Train on batches of groups and publish weights."),
        "evaluate": ("rollq.cli.commands.evaluate", "Evaluate saved weights, without training."),
    },
    "Watch": {
        "status": ("rollq.cli.commands.status", "Show the progress of a run; with --steps, its curves."),
        "top": ("rollq.cli.top.command", "Show a run live, and steer it by keyboard."),
        "dashboard": ("rollq.cli.commands.dashboard", "Show a run in a browser, down to single tokens."),
        "metrics": ("rollq.cli.commands.metrics", "Serve metrics of a run to Prometheus."),
    },
    "Steer": {
        "pause": ("rollq.cli.commands.pause", "Stop workers from taking new groups, or drain them."),
        "resume": ("rollq.cli.commands.pause", "Resume production."),
        "set": ("rollq.cli.commands.set", "Change rules of a task while the run is alive."),
        "groups": ("rollq.cli.commands.groups", "Find, show, sample again or drop groups; exclude rows."),
    },
    "Data": {
        "convert": ("rollq.cli.commands.convert", "Write a rollq.toml from settings of XTuner or Trinity-RFT."),
        "import": ("rollq.cli.commands.import_", "Put finished samples from a file into an offline task."),
        "export": ("rollq.cli.commands.archive", "Write groups of the buffer or of an archive to a file."),
        "archive": ("rollq.cli.commands.archive", "Keep trained and dropped groups, as Parquet files."),
        "snapshot": ("rollq.cli.commands.snapshots", "Save a run's buffer to a folder, and load it."),
    },
    "Server": {
        "doctor": ("rollq.cli.commands.doctor", "Check a run for current and future problems."),
        "runs": ("rollq.cli.commands.runs", "List, delete or recover runs; print a run's ACL file."),
    },
}
"""Group of commands -> name of a command -> the module that defines the command, and one line about it."""
RENAMED = {
    "checkpoint": "snapshot save",
    "restore": "snapshot load",
    "retire": "set TASK batch_groups=0",
    "delete": "runs delete",
    "load-functions": "doctor --load-functions",
    "rq-info": "status",
    "drain": "pause --drain",
    "show": "groups show",
    "query": "groups query",
}
"""Former name of a command -> its present name."""
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


class Commands(click.Group):
    """Commands by name, imported when they run; rollq's errors become one line and an exit status."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        values = vars(import_module(COMMANDS[name][0])).values()
        return next(value for value in values if isinstance(value, click.Command) and value.name == name)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in commands.items()])

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else "See `rollq --help`."
            if args[0] in RENAMED:
                hint = f"Write `rollq {RENAMED[args[0]]}`."
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", context)
        return super().resolve_command(context, args)

    def invoke(self, context: click.Context) -> Any:
        """Run a command. Exit status 2 means wrong settings, arguments or prompts; 1 means any other error."""
        try:
            return super().invoke(context)
        except click.NoSuchOption as error:
            if error.option_name in ("-f", "--file"):
                message = f"{error.message} FILE is the first argument."
                raise click.NoSuchOption(error.option_name, message, ctx=error.ctx) from None
            raise
        except RollqError as error:
            click.echo(f"error: {error}", err=True)
            context.exit(2 if isinstance(error, ConfigError | InvalidPrompt | RunMismatch) else 1)


@click.group("rollq", cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="rollq", prog_name="rollq", message="%(prog)s %(version)s")
def main() -> None:
    """Rollout queue and replay buffer for RL post-training of language models.

    Every role is a separate process; they exchange groups through Redis. `rollq up` runs all on one
    machine. On several:

    \b
      rollq redis --dir data            a server, if you have none
      rollq produce rollq.toml          prompts to jobs
      rollq work rollq.toml             jobs to groups; start one per GPU
      rollq train rollq.toml            groups to new weights
      rollq status rollq.toml           the progress of the run
    """


if __name__ == "__main__":
    main()
