"""The changes that the page offers, and the part of the program that makes them."""

from dataclasses import dataclass
from typing import Protocol

from rollq.buffer.steering import Order
from rollq.monitor.status import RunStatus


@dataclass(frozen=True, slots=True)
class Preview:
    """A change before it is made: a question, and what will change. `is_possible`: whether something changes."""

    title: str
    text: str
    is_possible: bool


class Steering(Protocol):
    """Pauses, resumes and drains. `kind`: run, task or worker; `name`: "" for the run."""

    def preview(self, run: RunStatus, order: Order, kind: str, name: str) -> Preview:
        """The change that an order would make. Raises `ConfigError` for an unknown name."""
        ...

    def make(self, order: Order, kind: str, name: str) -> list[str]:
        """Give the order; returns what has changed, a line each. Raises `RollqError`."""
        ...
