"""Groups in `rollq top`: found by a query, and moved by a confirmed order."""

import threading
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import orjson
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Input, Static

from rollq.buffer.calls.orders import GroupOrder
from rollq.buffer.errors import RollqError
from rollq.buffer.query.records import GroupRecord
from rollq.cli.groups.orders import Found, Outcome, effect_of, left_lines, name_of, order_groups, queried_groups
from rollq.cli.run_reader import RunReader
from rollq.cli.top.dialogs import Confirm
from rollq.monitor.dashboard.orders import Preview
from rollq.monitor.text.terminal import cut, one_line
from rollq.monitor.text.units import count

MOST_LISTED = 200
FIRST_QUERY = '{"status": "failed"}'
COLUMNS = ("", "group", "status", "reward", "tries", "error")
MOST_ERROR = 60
KEYS = "Enter: find    space: select    r requeue    x quarantine    d drop    Tab: query    Esc: back"


class Groups(ModalScreen[None]):
    """Lists a query's groups. An order applies to the selected groups, or else to the group at the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "app.pop_screen"),
        ("space", "mark"),
        ("r", "order('requeue')"),
        ("x", "order('quarantine')"),
        ("d", "order('drop')"),
    ]

    def __init__(self, make_reader: Callable[[], RunReader]) -> None:
        super().__init__()
        self._make_reader = make_reader
        self._groups: dict[str, GroupRecord] = {}
        self._marked: set[str] = set()

    def compose(self) -> ComposeResult:
        """The query, the list, and the keys."""
        with Vertical(classes="dialog wide"):
            yield Static("Find groups", classes="title", markup=False)
            yield Input(FIRST_QUERY, id="query")
            yield Static(id="said", markup=False)
            yield DataTable(id="found", cursor_type="row", cell_padding=1)
            yield Static(KEYS, markup=False)

    def on_mount(self) -> None:
        """Find the first query's groups."""
        self._table.add_columns(*COLUMNS)
        self._search()

    def on_input_submitted(self) -> None:
        """Find the query's groups."""
        self._search()

    def action_mark(self) -> None:
        """Toggle the selection of the group at the cursor."""
        if (name := self._at_cursor()) is not None:
            self._marked ^= {name}
            self._table.update_cell_at(Coordinate(self._table.cursor_row, 0), Text("*" if name in self._marked else ""))

    def action_order(self, order: str) -> None:
        """Ask whether to give an order to the selected groups."""
        at_cursor = self._at_cursor()
        names = self._marked or ({at_cursor} if at_cursor else set())
        groups = [group for name, group in self._groups.items() if name in names]
        if groups:
            self._start(partial(self._look, GroupOrder(order), groups))

    @property
    def _table(self) -> "DataTable[Text]":
        return self.query_one("#found", DataTable)

    def _at_cursor(self) -> str | None:
        table = self._table
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value if table.row_count else None

    def _say(self, text: str) -> None:
        self.query_one("#said", Static).update(Text(text))

    def _start(self, do: Callable[[], None]) -> None:
        """Run a call, which waits for the server, in a thread, and show any error."""

        def shown() -> None:
            try:
                do()
            except (RollqError, ValueError) as error:
                self._on_screen(self._say, str(error))

        threading.Thread(target=shown, name="groups", daemon=True).start()

    def _on_screen(self, do: Callable[..., object], *given: object) -> None:
        if self.is_attached:  # the dialog may be closed by now
            self.app.call_from_thread(do, *given)

    # -- in threads

    def _search(self, after: str = "") -> None:
        query = self.query_one("#query", Input).value
        self._start(partial(self._find, query, after))

    def _find(self, query: str, after: str) -> None:
        try:
            conditions = orjson.loads(query)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"the query is not JSON: {error}") from error
        with self._make_reader() as reader:
            found = reader.call(lambda buffer: queried_groups(buffer, conditions, MOST_LISTED))
        self._on_screen(self._show, found, after)

    def _order(self, order: GroupOrder, groups: list[GroupRecord], *, dry_run: bool) -> Outcome:
        with self._make_reader() as reader:
            return reader.call(lambda buffer: order_groups(buffer, order, groups, dry_run=dry_run))

    def _look(self, order: GroupOrder, groups: list[GroupRecord]) -> None:
        outcome = self._order(order, groups, dry_run=True)
        text = "\n".join([effect_of(order, outcome.moved), *left_lines(outcome)])
        question = Preview(f"{order.value.capitalize()} {count(len(groups), 'group')}?", text, bool(outcome.moved))
        chosen = [group for group in groups if name_of(group) not in outcome.left]
        self._on_screen(self._ask, question, order, chosen)

    def _make(self, order: GroupOrder, groups: list[GroupRecord]) -> None:
        outcome = self._order(order, groups, dry_run=False)
        left = f"; {count(len(outcome.left), 'group')} skipped" if outcome.left else ""
        self._on_screen(self._search, f"done: {effect_of(order, outcome.moved)}{left}")

    # -- on the screen

    def _ask(self, question: Preview, order: GroupOrder, groups: list[GroupRecord]) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self._start(partial(self._make, order, groups))

        self.app.push_screen(Confirm(question), answered)

    def _show(self, found: Found, after: str) -> None:
        self._groups = {name_of(group): group for group in found.groups}
        self._marked = set()
        self._table.clear()
        for name, group in self._groups.items():
            self._table.add_row(*map(Text, ("", *_cells(group))), key=name)
        number = f"{count(len(found.groups), 'group')}{' and more' * found.more}"
        self._say(f"{after}; {number}" if after else number)
        if found.groups:
            self._table.focus()


def _cells(group: GroupRecord) -> tuple[str, ...]:
    reward = "-" if group.reward is None else f"{group.reward:.3f}"
    return name_of(group), group.status, reward, str(group.tries), cut(one_line(group.error), MOST_ERROR)
