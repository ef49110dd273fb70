"""The screen of `rollq top`, which draws the feed's last reading and never waits for the server."""

import select
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.widgets import DataTable, Static

from rollq.buffer.calls.orders import Order
from rollq.buffer.errors import RollqError
from rollq.cli.changes import Change, change_of, names_of
from rollq.cli.run_reader import RunReader
from rollq.cli.steering import steer_tasks, steer_workers
from rollq.cli.top.dialogs import Confirm, Keys
from rollq.cli.top.feed import Feed, Frame
from rollq.cli.top.groups import Groups
from rollq.cli.top.tables import Rows, charts, task_rows, worker_rows
from rollq.monitor.status.diagnosis import Level, diagnose
from rollq.monitor.status.read import RunStatus
from rollq.monitor.status.text import WORKER_COLUMNS, evaluation_table, run_line, trainer_lines
from rollq.monitor.status.trainer_words import shortened
from rollq.monitor.text.units import seconds_in_words

DRAWN_EVERY_S = 0.5
OLD_S = 3.0
"""Above this age, the age of the shown data is red."""
BESIDE_CELLS = 4
"""Terminal columns that a table needs in addition to its cells."""
COLOURS = {Level.GOOD: "green", Level.ATTENTION: "yellow", Level.BAD: "red"}
SORTED_BY = ("", "worker", *WORKER_COLUMNS)


class Top(App[None]):
    """The app. Each change runs in its own thread, over the connection of a new reader."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #diagnosis { max-height: 40%; }
    #run, #trainer, #errors { color: $text-muted; }
    #trainer { max-height: 3; }
    #errors { max-height: 3; color: $text-error; }
    #tasks { height: auto; max-height: 30%; margin-top: 1; }
    #evaluations { height: auto; max-height: 20%; }
    #charts { height: auto; margin-top: 1; }
    #workers { height: 1fr; min-height: 3; margin-top: 1; }
    #keys { background: $panel; dock: bottom; }
    Confirm, Keys, Groups { align: center middle; }
    .dialog { width: 64; max-width: 95%; height: auto; max-height: 95%; border: round $accent; }
    .dialog { padding: 1 2; background: $surface; }
    .wide { width: 95%; height: 90%; }
    .wide DataTable { height: 1fr; }
    .title { text-style: bold; margin-bottom: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit"),
        ("ctrl+c", "quit"),
        ("p", "order('pause')"),
        ("r", "order('run')"),
        ("d", "order('drain')"),
        ("f", "find"),
        ("s", "sort"),
        ("S", "turn"),
        ("question_mark", "keys"),
    ]

    def __init__(self, run_name: str, feed: Feed, make_reader: Callable[[], RunReader]) -> None:
        super().__init__()
        self._run_name, self._feed, self._make_reader = run_name, feed, make_reader
        self._by, self._falling = "", False
        self._said = ""

    def compose(self) -> ComposeResult:
        """The parts of the screen, from top to bottom."""
        for part in ("diagnosis", "run", "trainer"):
            yield Static(id=part, markup=False)
        yield _table("tasks")
        yield Static(id="evaluations", markup=False)
        yield Static(id="charts", markup=False)
        yield _table("workers")
        yield Static(id="errors", markup=False)
        yield Static(id="keys", markup=False)

    def on_mount(self) -> None:
        """Start drawing."""
        self.query_one("#tasks").focus()
        self.set_interval(DRAWN_EVERY_S, self._draw)
        self.set_interval(DRAWN_EVERY_S, self._end_with_its_terminal)
        self._draw()

    def _end_with_its_terminal(self) -> None:
        """Exit if the terminal vanished without a hangup: from then on, every read returns at once."""
        if is_closed(sys.stdin.fileno()):
            self.exit()

    def on_resize(self) -> None:
        """Draw for the new width."""
        self._draw()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Show the history of the selected task."""
        if event.data_table.id == "tasks" and event.row_key.value and event.row_key.value != self._feed.task:
            self._feed.task = event.row_key.value
            self._feed.wake()

    def action_order(self, order: str) -> None:
        """Ask whether to give an order to the selected task or worker."""
        run, table = self._feed.frame.run, self.focused
        if run is None or not isinstance(table, DataTable) or not table.row_count:
            return
        name, kind = _selected(table), "task" if table.id == "tasks" else "worker"
        if name in names_of(run, kind):
            change = change_of(run, Order(order), kind, str(name))
            self.push_screen(Confirm(change), partial(self._confirmed, change))

    def action_sort(self) -> None:
        """Sort the workers by the next column."""
        self._by = SORTED_BY[(SORTED_BY.index(self._by) + 1) % len(SORTED_BY)]
        self._draw()

    def action_turn(self) -> None:
        """Reverse the order of the workers."""
        self._falling = not self._falling
        self._draw()

    def action_find(self) -> None:
        """Find groups, and move them."""
        self.push_screen(Groups(self._make_reader))

    def action_keys(self) -> None:
        """Show the keys."""
        self.push_screen(Keys())

    def _confirmed(self, change: Change, yes: bool | None) -> None:
        if yes:
            self._said = f"{change.title} ..."
            threading.Thread(target=self._make, args=(change,), name="change", daemon=True).start()

    def _make(self, change: Change) -> None:
        """Make a change, and show the outcome."""
        steer = steer_tasks if change.kind == "task" else steer_workers
        try:
            with self._make_reader() as reader:
                lines = reader.call(lambda buffer: list(steer(buffer, [change.name], change.order)))
            self._said = "; ".join(lines)
        except RollqError as error:
            self._said = f"{change.title} failed: {error}"
        self._feed.wake()

    def _draw(self) -> None:
        frame = self._feed.frame
        keys, more = "q quit  ? keys", "  p pause  r resume  d drain  f find groups  s sort"
        self._part("keys", Text(keys + (f"   {self._said}" if self._said else more), no_wrap=True))
        if frame.run is None:
            self._part("diagnosis", Text(frame.error or f"reading run {self._run_name} ..."))
            return
        run, width = frame.run, self.size.width
        diagnosis = diagnose(run)
        text = Text("\n".join([str(diagnosis), *diagnosis.to_do]))
        text.stylize(f"bold {COLOURS[diagnosis.level]}", 0, len(diagnosis.state))
        self._part("diagnosis", text)
        self._part("run", self._age(frame).append(run_line(run)))
        self._part("trainer", Text("\n".join(trainer_lines(run.trainer, width))))
        self._part("errors", Text("\n".join(_errors(run)), no_wrap=True))
        self._part("evaluations", Text("\n".join(evaluation_table(run.tasks)), no_wrap=True))
        self._part("charts", Text(f"task {frame.task}, the last hour\n" + "\n".join(charts(frame.history, width))))
        main = self.screen_stack[0]  # under a dialog, too
        _fill(main.query_one("#tasks", DataTable), *task_rows(run, width - BESIDE_CELLS))
        titles, rows = worker_rows(run, width - BESIDE_CELLS, self._by, falling=self._falling)
        _fill(main.query_one("#workers", DataTable), titles, rows)

    def _age(self, frame: Frame) -> Text:
        """The age of the reading, and the reason why there is no newer reading."""
        age_s = self._feed.now() - frame.read_s
        text = f"{seconds_in_words(age_s)} old" + (f", no answer: {shortened(frame.error)}" if frame.error else "")
        return Text(f"{text}; ", style="bold red" if frame.error or age_s >= OLD_S else "")

    def _part(self, name: str, text: Text) -> None:
        self.screen_stack[0].query_one(f"#{name}", Static).update(text)


def is_closed(terminal: int) -> bool:
    """Whether the other end of a terminal, given by its file descriptor, is gone."""
    poll = select.poll()
    poll.register(terminal, 0)
    return any(events & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))


def _table(name: str) -> "DataTable[Text]":
    return DataTable(id=name, cursor_type="row", zebra_stripes=False, cell_padding=1)


def _errors(run: RunStatus) -> list[str]:
    """The newest error of each task that has one, and why workers refuse the weights."""
    errors = [
        f"{task.task}, {seconds_in_words(task.last_error.age_s)} ago: {shortened(task.last_error.text)}"
        for task in run.tasks
        if task.last_error
    ]
    return errors + [
        f"{name}: {shortened(report['refused_weights'])}"
        for name, report in run.workers.items()
        if report.get("refused_weights")
    ]


def _fill(table: "DataTable[Text]", titles: list[str], rows: Rows) -> None:
    """Show rows in a table. The selection follows its row."""
    shown = [str(column.label) for column in table.ordered_columns]
    if shown == titles and [row.key.value for row in table.ordered_rows] == list(rows):
        _update(table, titles, rows)
        return
    selected = _selected(table) if table.row_count else None
    table.clear(columns=True)
    for title in titles:
        table.add_column(title, key=title)
    for key, cells in rows.items():
        table.add_row(*map(Text, cells), key=key)
    if selected in rows:
        table.move_cursor(row=list(rows).index(selected))


def _update(table: "DataTable[Text]", titles: list[str], rows: Rows) -> None:
    for key, cells in rows.items():
        for title, cell in zip(titles, cells, strict=True):
            if str(table.get_cell(key, title)) != cell:
                table.update_cell(key, title, Text(cell), update_width=True)


def _selected(table: "DataTable[Text]") -> str | None:
    """The key of the selected row."""
    return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
