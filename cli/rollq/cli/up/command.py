"""`rollq up`: every role of a settings file on this machine."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.cli.options import settings_file

if TYPE_CHECKING:
    from rollq.cli.up.watch import Watch


@click.command()
@settings_file
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Number of worker processes.")
@click.option("--live/--no-live", default=True, help="Live view on a terminal, or a line every few seconds.")
def up(file: Path, workers: int, live: bool) -> None:
    """Run all roles of FILE on this machine: producer, workers, and the trainer and archiver that it configures.

    If no server answers at the URL in FILE, it also runs one, with its data in the folder server beside the output of
    [trainer]; the folder logs there has a log for each role. A role that dies is restarted. The command ends when the
    trainer has trained all its steps. Ctrl-C stops all roles, a second Ctrl-C at once. To continue, run the same
    command.

    \b
    Example:
      rollq up rollq.toml
      rollq up rollq.toml --workers 2
    """
    from rollq.buffer.store.redis_url import mask_url
    from rollq.cli.run_location import RunLocation
    from rollq.cli.settings.file import load_settings
    from rollq.cli.signals import interrupt_once
    from rollq.cli.up.roles import check_roles, role_commands
    from rollq.cli.up.run import Running, alone_in, grace_s, run_folder, run_roles, source_of_run_folder
    from rollq.cli.up.server import server_at

    settings = load_settings(file)
    again = f"`rollq up {shlex.quote(str(file))}` continues"
    folder = run_folder(settings, file)
    running = Running(file, settings, folder / "logs", workers, live, grace_s(settings), title=settings.run)
    with interrupt_once(running.grace_s + 10, again_kills=True):
        try:
            check_roles(settings, file)
            location = RunLocation.from_settings(settings)
            with (
                alone_in(folder, source_of_run_folder(settings), "up"),
                server_at(location, folder / "server") as server,
            ):
                where = f"started here, data in {server.directory}" if server else "it runs already"
                click.echo(f"server: {mask_url(location.buffer_url)} ({where})")
                names = [role.name for role in role_commands(settings, file, workers)]
                click.echo(f"roles: {', '.join(names)}; logs in {running.logs}")
                watch = run_roles(running, server)
        except KeyboardInterrupt:
            click.echo(f"\nstopped; {again}")
            raise SystemExit(130) from None
    click.echo(_summary(watch, settings.trainer.output if settings.trainer else None))


def _summary(watch: "Watch", output: Path | None) -> str:
    from rollq.monitor.report.live_view import clock, mean_reward

    view = watch.view()
    window = max(1, min(len(view.recent), len(view.steps) // 2))
    first, last = mean_reward(view.steps[:window]), mean_reward(view.steps[-window:])
    reward = f"; mean reward {first:.3f} -> {last:.3f} (first and last {window} steps)" if view.steps else ""
    return f"trained {view.step} of {view.total_steps} steps in {clock(view.elapsed_s)}{reward}; weights in {output}"
