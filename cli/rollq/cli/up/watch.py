"""Watches roles while they run: restarts dead roles, records the buffer's depths, and shows the live view."""

import contextlib
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
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.up.supervisor import Supervisor
from rollq.monitor.report.buffer_reading import take_reading
from rollq.monitor.report.live_view import LiveView, clock, plain_line, render
from rollq.monitor.report.records import BufferReading, append_line, read_steps

TICK_S = 1.0
PLAIN_EVERY_S = 5.0
KEPT_NOTES = 5


@dataclass(slots=True)
class Watch:
    """A watch over running roles. The trainer, if there is one, writes `metrics` over `total_steps`; the watch writes
    `depths`, if it is set; times are in seconds."""

    title: str
    metrics: Path | None
    depths: Path | None
    total_steps: int
    started_s: float = field(default_factory=time.monotonic)
    snapshot: BufferReading = field(default_factory=lambda: BufferReading(time_s=0.0))
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_NOTES))

    @property
    def elapsed_s(self) -> float:
        """Time since the start."""
        return time.monotonic() - self.started_s

    def until_finished(
        self, buffer: MonitorBuffer, server: EmbeddedServer | None, supervisor: Supervisor, *, live: bool
    ) -> None:
        """Wait until the role that `finishes` has finished, or indefinitely without such a role. Raises `RoleFailed` if
        a role cannot be kept running, and `ConfigError` if a role refuses its settings.
        """
        trainer = next((role for role in supervisor.roles if role.finishes), None)
        with self._display(live) as show:
            while trainer is None or not trainer.finished:
                supervisor.wait(trainer, TICK_S)
                self._restart_dead(server, supervisor)
                self.take_reading(buffer)
                show(self.view())

    def _restart_dead(self, server: EmbeddedServer | None, supervisor: Supervisor) -> None:
        if server is not None and not server.running:
            server.start()
            self.note("the server died and was restarted")
        for note in supervisor.restart_dead():
            self.note(note)

    def note(self, text: str) -> None:
        """Show the user an event."""
        self.notes.append(f"{clock(self.elapsed_s)} {text}")

    def take_reading(self, buffer: MonitorBuffer) -> None:
        """Read the buffer and record it; before the first role has created the run, there is nothing to read."""
        with contextlib.suppress(StoreLost, ServerUnavailable):
            self.snapshot = take_reading(buffer)
            if self.depths is not None:
                append_line(self.depths, self.snapshot.as_dict())

    def view(self) -> LiveView:
        """The present state of the live view."""
        return LiveView(
            title=self.title,
            total_steps=self.total_steps,
            elapsed_s=self.elapsed_s,
            steps=read_steps(self.metrics) if self.metrics else (),
            reading=self.snapshot,
            notes=tuple(self.notes),
        )

    @contextlib.contextmanager
    def _display(self, live: bool) -> Iterator[Callable[[LiveView], None]]:
        """Show the live view on a terminal; elsewhere, print a line every few seconds and each note once."""
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
