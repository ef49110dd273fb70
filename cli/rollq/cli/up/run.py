"""Runs a settings file's roles until the trainer has finished."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from rollq.buffer.common.writing import writing_to
from rollq.buffer.errors import ConfigError
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.run_location import RunLocation
from rollq.cli.settings.model import RollqSettings
from rollq.cli.up.roles import ROLLQ, role_commands
from rollq.cli.up.supervisor import Supervisor
from rollq.cli.up.watch import Watch
from rollq.monitor.changes.on_change import on_change
from rollq.monitor.changes.watcher import ChangeWatcher
from rollq.monitor.report.records import METRICS_FILE
from rollq.monitor.status.read import read_status

READ_PATIENCE_S = 2.0
"""How long reading the buffer waits for a server that is down, in seconds."""


@dataclass(frozen=True, slots=True)
class Running:
    """A running system: the settings from `file`, with logs in `logs` and `workers` workers.

    Readings of the buffer go to `depths`, if it is set. The roles have `grace_s` seconds to stop.
    """

    file: Path
    settings: RollqSettings
    logs: Path
    workers: int
    live: bool
    grace_s: float
    title: str
    depths: Path | None = None

    def watch(self) -> Watch:
        """A watch for these roles."""
        trainer = self.settings.trainer
        metrics = trainer.output / METRICS_FILE if trainer else None
        return Watch(self.title, metrics, self.depths, trainer.steps if trainer else 0)


@contextmanager
def alone_in(folder: Path, source: str, command: str) -> Iterator[None]:
    """Hold the folder of logs and server inside the `with` block. Raises `ConfigError` if another process holds it, and
    naming its `source` if it cannot be written. `command` is the name of the command, which that process runs too."""
    with writing_to(source, folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "up.lock").open("w")
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another `rollq {command}` runs in {str(folder)!r}: stop it, or name another output in [trainer]"
            ) from None
        yield


def run_roles(running: Running, server: EmbeddedServer | None) -> Watch:
    """Run the roles, and `server` if this process owns it, until the trainer has finished; returns the watch.

    Without a trainer, the roles run until interrupted. Raises `RoleFailed` when a role cannot be kept running, and
    `ConfigError` when a role refuses its settings.
    """
    watch, location = running.watch(), RunLocation.from_settings(running.settings)
    patience = Patience(READ_PATIENCE_S, READ_PATIENCE_S)
    with location.without_payloads(patience) as buffer, _calling(running, location, buffer, watch):
        with Supervisor(running.logs, os.environ, grace_s=running.grace_s) as supervisor:
            for role in role_commands(running.settings, running.file, running.workers):
                supervisor.start(role.name, role.command, finishes=role.finishes)
            try:
                watch.until_finished(buffer, server, supervisor, live=running.live)
            except KeyboardInterrupt:
                click.echo(f"\nstopping the roles, within {running.grace_s:.0f} s")
                raise
        if running.settings.archive.url:
            _finish_archive(running)
        watch.take_reading(buffer)  # once all roles have stopped, the counts add up
    return watch


def _calling(
    running: Running, location: RunLocation, buffer: MonitorBuffer, watch: Watch
) -> AbstractContextManager[ChangeWatcher | None]:
    """Watches the run for `on_change` inside the `with` block, with a last look at its end unless the block is
    interrupted."""
    queue, patience = location.queue(), Patience(READ_PATIENCE_S, READ_PATIENCE_S)
    return on_change(
        running.settings.monitor,
        location.run,
        running.file.absolute().parent,
        read=lambda: read_status(buffer, queue, patience),
        replace=lambda state, if_absent: buffer.replace_reported_state(state, if_absent=if_absent),
        output=running.logs / "on_change.log",
        last_look=True,
        on_failure=watch.note,
    )


def _finish_archive(running: Running) -> None:
    with Supervisor(running.logs, os.environ, grace_s=running.grace_s) as supervisor:
        role = supervisor.start("archiver", (*ROLLQ, "archive", str(running.file), "--finish"), finishes=True)
        while not role.finished:
            supervisor.wait(role)
            supervisor.restart_dead()


def grace_s(settings: RollqSettings) -> float:
    """How long `rollq up` waits for its roles to stop: workers for their groups, the trainer for its checkpoint."""
    return settings.worker.grace_s + 30.0


def run_folder(settings: RollqSettings, file: Path) -> Path:
    """The folder for the server's data and the logs: beside the trainer's output, or else the file's folder."""
    return settings.trainer.output.parent if settings.trainer else file.absolute().parent


def source_of_run_folder(settings: RollqSettings) -> str:
    """The source of `run_folder`, in a user's words."""
    return "the parent folder of [trainer] output," if settings.trainer else "the settings file's folder"
