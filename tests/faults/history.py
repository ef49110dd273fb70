"""What a role did: each call, and whether it returned, failed, or was never heard of again. Imports nothing from rollq.

A history is a file of JSON lines, one per event. Every line is one `write` to a file opened for appending, so a SIGKILL
loses at most the event that was about to happen. A call without an end counts as `unknown`: it may have taken effect.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

CALL, OK, FAIL, UNKNOWN, NOTE = "call", "ok", "fail", "unknown", "note"


class Call:
    """A call in progress. It ends as `unknown` unless `ok` or `fail` says otherwise."""

    def __init__(self) -> None:
        self.end = UNKNOWN
        self.facts: dict[str, Any] = {}

    def ok(self, **facts: Any) -> None:
        """The call returned, so that it took effect for good."""
        self.end, self.facts = OK, facts

    def fail(self, **facts: Any) -> None:
        """The call was refused, so that it changed nothing."""
        self.end, self.facts = FAIL, facts


class History:
    """The history of one process of a role, in `folder`."""

    def __init__(self, folder: Path, role: str) -> None:
        self.role = role
        self._path = folder / f"{role}-{os.getpid()}-{time.monotonic_ns()}.jsonl"
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._numbers = count()

    def note(self, what: str, **facts: Any) -> None:
        """An event that is not a call."""
        self._write(NOTE, what, next(self._numbers), facts)

    @contextmanager
    def call(self, what: str, **facts: Any) -> Iterator[Call]:
        """Record a call around the block that makes it. An exception leaves it `unknown` unless `fail` was called."""
        number, call = next(self._numbers), Call()
        self._write(CALL, what, number, facts)
        try:
            yield call
        finally:
            self._write(call.end, what, number, call.facts)

    def _write(self, kind: str, what: str, number: int, facts: Mapping[str, Any]) -> None:
        event = {"at_ns": time.monotonic_ns(), "kind": kind, "what": what, "number": number, **facts}
        os.write(self._file, json.dumps(event).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class Event:
    """A call with its end, or a note. `facts` are those of the start and of the end together."""

    role: str
    what: str
    end: str
    began_ns: int
    ended_ns: int
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, fact: str) -> Any:
        return self.facts[fact]


def read_histories(folder: Path) -> list[Event]:
    """The events of all histories in a folder, in the order in which they began."""
    events: list[Event] = []
    for path in sorted(folder.glob("*.jsonl")):
        events += read_history(path)
    return sorted(events, key=lambda event: event.began_ns)


def read_history(path: Path) -> Sequence[Event]:
    """The events of one process."""
    role = path.name.rsplit("-", 2)[0]
    events: dict[int, Event] = {}
    for line in path.read_bytes().splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # a line that a SIGKILL cut off
        kind, what, number, at_ns = (found.pop(name) for name in ("kind", "what", "number", "at_ns"))
        began = events.get(number)
        if began is None:
            end = NOTE if kind == NOTE else UNKNOWN
            events[number] = Event(role, what, end, at_ns, at_ns, found)
        else:
            events[number] = Event(role, what, kind, began.began_ns, at_ns, {**began.facts, **found})
    return list(events.values())
