"""The rollouts in the buffer of a live run."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from rollq.buffer.calls.group_details import FoundGroup
from rollq.buffer.query.selection import Candidate, Candidates, Page, Selection
from rollq.buffer.roles import MonitorBuffer
from rollq.monitor.status.read import RunStatus

T = TypeVar("T")


class Reader(Protocol):
    """Reads a run, from any thread."""

    def read(self) -> RunStatus:
        """Read the status now. Raises `RollqError`."""
        ...

    def call(self, do: Callable[[MonitorBuffer], T]) -> T:
        """Return `do(buffer)` for the run's buffer. Raises its exceptions, and `RollqError` if the run cannot be
        read."""
        ...


class LiveRollouts:
    """The groups in the buffer."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def incarnation(self) -> str:
        """The identity of the run, which changes if the run is deleted and recreated."""
        return self._reader.call(lambda buffer: buffer.incarnation)

    def tasks(self) -> list[str]:
        """Names of the tasks, sorted."""
        return self._reader.call(lambda buffer: buffer.tasks())

    def page(self, selection: Selection, *, after: str, limit: int) -> Page:
        """Some groups of a selection."""
        return self._reader.call(lambda buffer: buffer.page(selection, after=after, limit=limit))

    def look(self, task: str, group_id: int) -> FoundGroup | None:
        """A group with its samples; None if it does not exist."""
        groups = self._reader.call(lambda buffer: buffer.look(task, [group_id]) if task in buffer.tasks() else [])
        return groups[0] if groups else None

    def candidates(self, selection: Selection) -> Candidates:
        """The groups that a ranked list may show, in the list's order."""
        return self._reader.call(lambda buffer: buffer.candidates(selection))

    def read_candidates(self, some: Sequence[Candidate], selection: Selection) -> list[FoundGroup]:
        """The candidates' groups that still exist."""
        return self._reader.call(lambda buffer: list(buffer.read_candidates(some, selection)))

    def among(self, groups: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
        """Of these groups, by task and number, those in the buffer."""
        by_task = defaultdict[str, list[int]](list)
        for task, group_id in groups:
            by_task[task].append(group_id)
        return self._reader.call(
            lambda buffer: {(task, record.uid) for task, ids in by_task.items() for record in buffer.records(task, ids)}
        )
