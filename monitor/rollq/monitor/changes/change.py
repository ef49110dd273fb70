"""When a new state of a run counts as a change, and the facts of one. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollq.monitor.status.diagnosis import Diagnosis, State, diagnose
from rollq.monitor.status.read import RunStatus

UNREADABLE: Final = "unreadable"
"""The state of a run whose server does not answer or does not have it, beside the states of the diagnosis."""


@dataclass(frozen=True, slots=True)
class Look:
    """A run as it is seen at one moment. `state`: of the diagnosis, or `UNREADABLE`."""

    state: str
    sentence: str
    remedies: tuple[str, ...] = ()

    @classmethod
    def at(cls, status: RunStatus | None, problem: str) -> "Look":
        """The look at a status, or at a `problem` where there is none."""
        if status is None:
            return cls(UNREADABLE, problem or "the run cannot be read")
        found: Diagnosis = diagnose(status)
        return cls(found.state.value, found.sentence, found.remedies)

    def facts(self, run: str, before: str) -> Mapping[str, Any]:
        """The change from the state `before`, as the command gets it."""
        return {
            "run": run,
            "before": before,
            "state": self.state,
            "sentence": self.sentence,
            "remedies": list(self.remedies),
        }


class Steady:
    """The state in which a run has been for long enough: one that comes and goes does not count."""

    def __init__(self, state: str, after_s: float) -> None:
        self.state = state
        """The last state that counted."""
        self._after_s = after_s
        self._next: tuple[str, float] | None = None

    def has_changed(self, state: str, now_s: float) -> bool:
        """Take in the state at `now_s`, by a steady clock in seconds; returns whether a new one counts from now on.

        A finished run counts at once, as nothing follows.
        """
        if state == self.state:
            self._next = None
            return False
        if self._next is None or self._next[0] != state:
            self._next = (state, now_s)
        if now_s - self._next[1] < self._after_s and state != State.FINISHED:
            return False
        self.state, self._next = state, None
        return True
