"""`rollq status`, once or each second: on a screen that is drawn again, or as repeated output."""

import shutil
import sys
import threading
from collections.abc import Callable

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollq.buffer.errors import ServerUnavailable
from rollq.buffer.store.connection import Patience
from rollq.cli.run_location import RunLocation
from rollq.cli.signals import stop_on_signals
from rollq.monitor.status import text
from rollq.monitor.status.diagnosis import State, diagnose
from rollq.monitor.status.read import RunStatus, read_status

EVERY_S = 1.0
UNANSWERED_S = 2.0
"""How long a watch waits for the server before it says that there is no answer."""
COLOURS = {
    State.STARTING: "cyan",
    State.TRAINING: "green",
    State.STARVING: "yellow",
    State.PAUSED: "blue",
    State.FAILING: "red",
    State.MEMORY_FULL: "red",
    State.TRAINER_GONE: "red",
    State.STOPPED: "blue",
    State.FINISHED: "green",
}


def show_status(location: RunLocation, *, as_json: bool) -> None:
    """Print the status once."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else text.WIDTH
    with location.without_payloads() as buffer:
        run = read_status(buffer, location.queue())
    click.echo(text.as_json(run) if as_json else text.as_table(run, width))


def watch_status(location: RunLocation, *, as_json: bool) -> None:
    """Show the status each second until SIGINT or SIGTERM. While the server is away, say so and try again."""
    stop, queue = stop_on_signals(), location.queue()
    patience = Patience(UNANSWERED_S, UNANSWERED_S, closed=stop)
    with location.without_payloads(patience) as buffer:

        def read() -> RunStatus:
            return read_status(buffer, queue, patience)

        if as_json or not sys.stdout.isatty():
            _repeat(read, stop, text.as_json_line if as_json else lambda run: f"{text.as_table(run)}\n")
        else:
            _redraw(read, stop, Console())


def _redraw(read: Callable[[], RunStatus], stop: threading.Event, console: Console) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not stop.is_set():
            try:
                shown = picture(read(), console.width, console.height)
            except ServerUnavailable as error:
                shown = Text(f"no answer: {error}", style="bold red")
            live.update(shown, refresh=True)
            stop.wait(EVERY_S)


def _repeat(read: Callable[[], RunStatus], stop: threading.Event, text_of: Callable[[RunStatus], str]) -> None:
    while not stop.is_set():
        try:
            click.echo(text_of(read()))
        except ServerUnavailable as error:
            if not stop.is_set():
                click.echo(f"no answer: {error}", err=True)
        stop.wait(EVERY_S)


def picture(run: RunStatus, width: int, height: int) -> Text:
    """The screen, cut to the terminal. The diagnosis is at the top, so that it is always seen."""
    lines, state = text.as_table(run, width).splitlines()[:height], diagnose(run).state
    shown = Text("\n".join(lines), overflow="crop", no_wrap=True)
    shown.highlight_regex(rf"\A{state}", f"bold {COLOURS[state]}")
    shown.highlight_words(["DEAD", "SILENT"], "bold red")
    return shown
