"""Watches a demo while its processes run: restarts who dies, records the buffer's depths, shows the live view."""

import contextlib
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from rollq.buffer.errors import ServerUnavailable, StoreLost
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.store.server import EmbeddedServer
from rollq.cli.demo.supervisor import Role, Supervisor
from rollq.monitor.live import LiveView, clock, plain_line, render
from rollq.monitor.reading import take_reading
from rollq.monitor.records import BufferReading, append_line, read_steps

TICK_S = 1.0
PLAIN_EVERY_S = 5.0
KEPT_NOTES = 5


@dataclass(slots=True)
class Watch:
    """One demo under way. `metrics` is written by the trainer, `depths` by this."""

    title: str
    metrics: Path
    depths: Path
    total_steps: int
    limit_s: float
    started_s: float = field(default_factory=time.monotonic)
    snapshot: BufferReading = field(default_factory=lambda: BufferReading(time_s=0.0))
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_NOTES))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def until_finished(
        self, buffer: MonitorBuffer, server: EmbeddedServer, supervisor: Supervisor, trainer: Role, *, live: bool
    ) -> bool:
        """Return when the trainer has finished: True; or False when the time is up and it was told to stop.

        Raises `RoleFailed` when a role cannot be kept running.
        """
        with self._display(live) as show:
            while not trainer.finished:
                if self.elapsed_s > self.limit_s:
                    return False
                assert trainer.process is not None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    trainer.process.wait(TICK_S)
                if not server.running:
                    server.start()
                    self.note("the server died and was started again")
                for note in supervisor.restart_dead():
                    self.note(note)
                self.look(buffer)
                show(self.view())
        return True

    def note(self, text: str) -> None:
        """Tell the user of an event."""
        self.notes.append(f"{clock(self.elapsed_s)} {text}")

    def look(self, buffer: MonitorBuffer) -> None:
        """Take a snapshot and keep it; before the first role has made the run there is nothing to see."""
        with contextlib.suppress(StoreLost, ServerUnavailable):
            self.snapshot = take_reading(buffer)
            append_line(self.depths, self.snapshot.as_dict())

    def view(self) -> LiveView:
        """What is shown now."""
        return LiveView(
            title=self.title,
            total_steps=self.total_steps,
            elapsed_s=self.elapsed_s,
            limit_s=self.limit_s,
            steps=read_steps(self.metrics),
            reading=self.snapshot,
            notes=tuple(self.notes),
        )

    @contextlib.contextmanager
    def _display(self, live: bool) -> Iterator[Callable[[LiveView], None]]:
        """The live view on a terminal; elsewhere a line every few seconds, and each note once."""
        if live and sys.stdout.isatty():
            with Live(console=Console(), auto_refresh=False) as screen:
                yield lambda view: screen.update(render(view), refresh=True)
            return
        shown: list[str] = []
        next_s = 0.0

        def show(view: LiveView) -> None:
            nonlocal next_s
            for note in view.notes:
                if note not in shown:
                    shown.append(note)
                    click.echo(note)
            if view.elapsed_s >= next_s:
                click.echo(plain_line(view))
                next_s = view.elapsed_s + PLAIN_EVERY_S

        yield show
