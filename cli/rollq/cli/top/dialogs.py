"""The dialogs of `rollq top`: a change to confirm, and the keys."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from rollq.cli.changes import Change
from rollq.monitor.dashboard.orders import Preview

KEYS = """\
Tab        tasks, workers
Up, Down   select
s, S       sort workers by the next column; reverse the order
p          pause the selected task or worker
r          resume it
d          drain it
f          find groups, and requeue, quarantine or drop them
?          these keys
q, Ctrl-C  quit

Each change first says what it will do, and asks for confirmation."""


class Confirm(ModalScreen[bool]):
    """Shows a change, and returns whether it is confirmed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "answer(True)"),
        ("n", "answer(False)"),
        ("escape", "answer(False)"),
        ("q", "answer(False)"),
    ]

    def __init__(self, change: Change | Preview) -> None:
        super().__init__()
        self._change = change

    def compose(self) -> ComposeResult:
        """The question, what will change, and the keys."""
        keys = "y: yes    n, Esc: no" if self._change.is_possible else "Esc: back"
        with Vertical(classes="dialog"):
            yield Static(self._change.title, classes="title", markup=False)
            yield Static(f"{self._change.text}\n\n{keys}", markup=False)

    def action_answer(self, yes: bool) -> None:
        """Close the dialog; only a change with an effect can be confirmed."""
        self.dismiss(yes and self._change.is_possible)


class Keys(ModalScreen[None]):
    """Shows the keys until Esc, q or ? is pressed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "app.pop_screen"),
        ("q", "app.pop_screen"),
        ("question_mark", "app.pop_screen"),
    ]

    def compose(self) -> ComposeResult:
        """The list."""
        with Vertical(classes="dialog"):
            yield Static("Keys", classes="title")
            yield Static(f"{KEYS}\n\nEsc: back", markup=False)
