"""Evaluations' runs: each run has a note in its evaluation's folder for as long as the run may exist.

With these notes, an evaluation deletes runs that killed evaluations left behind. Its caller holds a lock on the folder,
so the process that wrote an older note on this machine has ended. On other machines, the lock may have no effect: runs
from there are deleted only if no role uses them.
"""

import hashlib
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.calls.runs import GONE, summarize
from rollq.buffer.errors import ConfigError, ServerRefused
from rollq.cli.run_location import RunLocation, open_run
from rollq.cli.settings.model import RollqSettings


@dataclass(frozen=True, slots=True)
class EvaluationRuns:
    """The evaluation runs with notes in `folder`, on one server."""

    folder: Path

    @classmethod
    def at(cls, location: RunLocation, folder: Path, *, is_beside: bool) -> "EvaluationRuns":
        """The runs on the location's server. With `is_beside`, the server was started for the evaluation, at any
        port."""
        server = "beside" if is_beside else hashlib.sha256(location.buffer_url.encode()).hexdigest()[:16]
        return cls(folder / "runs" / server)

    @contextmanager
    def opened(self, settings: RollqSettings, location: RunLocation) -> Iterator[None]:
        """Create the run, with its tasks paused, for as long as the context is open, and then delete it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        note = self.folder / location.run
        note.write_text(socket.gethostname(), "utf-8")
        with open_run(settings, threading.Event()) as buffer:
            for task in settings.train_tasks():
                buffer.set_control(task, Control.PAUSE, "this run only evaluates")
            try:
                yield
            finally:
                _delete(buffer, location, note)  # its roles were stopped a moment ago

    def delete_left(self, location: RunLocation) -> None:
        """Delete the runs that are left, and report this. A run in use stays for the next evaluation."""
        for note in sorted(self.folder.glob("*")):
            try:
                _delete_left(replace(location, run=note.name), note)
            except (ConfigError, ServerRefused) as error:
                click.echo(f"run {note.name!r}, which a killed evaluation has left, stays: {error}", err=True)


def _delete_left(location: RunLocation, note: Path) -> None:
    with location.buffer() as buffer:
        summary = summarize(buffer)
        if summary.state == GONE:
            note.unlink()
        elif summary.roles and note.read_text("utf-8") != socket.gethostname():
            click.echo(f"run {location.run!r} of another evaluation is in use: {'; '.join(summary.roles)}", err=True)
        else:
            _delete(buffer, location, note)
            click.echo(f"deleted run {location.run!r}, which a killed evaluation had left", err=True)


def _delete(buffer: Buffer, location: RunLocation, note: Path) -> None:
    queue = location.queue()
    with closing(queue.connection):
        buffer.delete_run(queue, force=True)
    note.unlink()
