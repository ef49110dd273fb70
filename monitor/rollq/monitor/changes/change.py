"""Decides when a run's new state counts as a change, and describes the change. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollq.monitor.status.diagnosis import Diagnosis, State, diagnose
from rollq.monitor.status.read import RunStatus

UNREADABLE: Final = "unreadable"
"""The state, beside the diagnosis's states, of a run whose server is unreachable or lacks the run."""


@dataclass(frozen=True, slots=True)
class Look:
    """A view of a run at one moment. `state` is the diagnosis's state, or `UNREADABLE`."""

    state: str
    sentence: str
    remedies: tuple[str, ...] = ()

    @classmethod
    def at(cls, status: RunStatus | None, problem: str) -> "Look":
        """The view from a status, or from a `problem` if there is no status."""
        if status is None:
            return cls(UNREADABLE, problem or "the run cannot be read")
        found: Diagnosis = diagnose(status)
        return cls(found.state.value, found.sentence, found.remedies)

    def facts(self, run: str, before: str) -> Mapping[str, Any]:
        """The change from the state `before`, for the command."""
        return {
            "run": run,
            "before": before,
            "state": self.state,
            "sentence": self.sentence,
            "remedies": list(self.remedies),
        }


class Steady:
    """The state that a run has had for long enough; brief states do not count."""

    def __init__(self, state: str, after_s: float) -> None:
        self.state = state
        """The last state that counted."""
        self._after_s = after_s
        self._next: tuple[str, float] | None = None

    def has_changed(self, state: str, now_s: float) -> bool:
        """Note the state at `now_s`, in seconds on a steady clock. Returns whether a new state counts from now on.

        `finished` counts at once, since no state follows.
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
