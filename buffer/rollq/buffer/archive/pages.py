"""Pages through an archive's groups: newest steps first, one file and few of its columns at a time.

`refresh` finds files that appeared later.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from rollq.buffer.archive.group_details import found_group
from rollq.buffer.archive.reader import OF_A_STEP, Archive, by_group
from rollq.buffer.archive.rows import Row
from rollq.buffer.calls.group_details import FoundGroup
from rollq.buffer.common import exact_json
from rollq.buffer.query.ranking import MOST_SORTED
from rollq.buffer.query.selection import (
    MOST_ROWS,
    Candidate,
    Candidates,
    Filling,
    Page,
    Selection,
    parse_after,
    ranked_page,
)
from rollq.buffer.values.rollouts import Sample, SampleStatus

FILES_KEPT = 8
"""The number of files whose groups are kept in memory, without their samples."""
FILES_PER_PAGE = 32
"""The most files read for one page."""
LISTED = (
    "task", "group_id", "sample", "outcome", "reason", "step", "status", "reward", "worker", "versions",
    "prompt_record", "tries", "admitted_at", "put_at", "claimed_at", "committed_at", "left_at", "generate_ms", "row",
    "pipeline", "leases", "finish_reason", "error", "failure",
)  # fmt: skip
"""The columns that a group list reads."""
SEARCHED = ("status", "text", "extra")
"""The sample columns that a search reads."""


class _Listed(NamedTuple):
    """A group without its samples, and the file rows that hold the samples."""

    group: FoundGroup
    first: int
    rows: int


class _Name(NamedTuple):
    """A file's name, and its groups' task and step; these are None if the name lacks them."""

    name: str
    task: str | None
    step: int | None


class ArchivePages:
    """The groups of the archive's run. Thread-safe."""

    def __init__(self, archive: Archive) -> None:
        """Raises `ArchiveError` if the archive has several runs, or files that this rollq cannot read."""
        self.url = archive.url
        self.run, self.incarnation = archive.run()
        self._archive = archive
        self._names = _names_of(archive)
        self._files: OrderedDict[str, list[_Listed]] = OrderedDict()
        self._ids: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._tasks = sorted(set().union(*map(self._tasks_of, self._names)))

    def refresh(self) -> None:
        """Find files that appeared since the last listing."""
        self._archive.refresh()
        with self._lock:
            self._names = _names_of(self._archive)

    def tasks(self) -> list[str]:
        """Names of the tasks, sorted."""
        return self._tasks

    def page(self, selection: Selection, *, after: str = "", limit: int = 50) -> Page:
        """Return up to `limit` groups of a selection; see `Paging.page`. A search reads at most `MOST_READ` groups.

        A page reads at most `FILES_PER_PAGE` files, so an empty page may still have a next page.

        Raises `QueryError`, `ArchiveError`.
        """
        limit = max(1, min(limit, MOST_ROWS))
        if selection.is_ranked:
            return ranked_page(self.candidates(selection), selection, self.read_candidates, after=after, limit=limit)
        return self._page_of_files(selection, *parse_after(after), limit)

    def candidates(self, selection: Selection) -> Candidates:
        """The groups of a ranked list, in order: at most `MOST_SORTED`, from the selection's newest `FILES_PER_PAGE`
        files."""
        found: list[Candidate] = []
        names = [name.name for name in self._names if _may_have(name, selection)]
        looked_at = files = 0
        with self._lock:
            for name in names[:FILES_PER_PAGE]:
                if looked_at >= MOST_SORTED:
                    break
                listed, files = self._list(name), files + 1
                looked_at += len(listed)
                for index, group in _wanted(listed, selection):
                    if (place := selection.place(group, group.outcomes)) is not None:
                        found.append(Candidate(place, group.task, group.group_id, (name, index)))
        return Candidates(sorted(found, key=lambda one: one.place), files < len(names))

    def read_candidates(self, some: Sequence[Candidate], selection: Selection) -> Iterator[FoundGroup]:
        """The candidates' groups, with only the sample columns that a search needs."""
        for candidate in some:
            name, index = candidate.where
            with self._lock:
                yield self._searchable(name, self._list(name)[index], selection)

    def _page_of_files(self, selection: Selection, place: int, rank: int, limit: int) -> Page:
        filling, firsts = Filling(selection, limit), {place: rank}
        with self._lock:
            places = [at for at in range(place, len(self._names)) if _may_have(self._names[at], selection)]
            for at in places[:FILES_PER_PAGE]:
                listed = self._list(name := self._names[at].name)
                for index, _ in _wanted(listed, selection, firsts.get(at, 0)):
                    if not filling.next_groups:
                        return filling.page(f"{at}.{index}")
                    filling.add(1, [self._searchable(name, listed[index], selection)])
        return filling.page(next((f"{at}.0" for at in places[FILES_PER_PAGE:]), None))

    def look(self, task: str, group_id: int) -> FoundGroup | None:
        """A group with its samples; None if the archive has no such group. Raises `ArchiveError`."""
        with self._lock:
            for name in self._names:
                if name.task not in (task, None) or not self._may_have_group(name.name, group_id):
                    continue
                for one in self._list(name.name):
                    if (one.group.task, one.group.group_id) == (task, group_id):
                        return found_group(self._read(name.name, one, None), _now_ms(), with_samples=True)
        return None

    def _searchable(self, name: str, one: _Listed, selection: Selection) -> FoundGroup:
        """A group with only the sample columns that a search needs."""
        if not selection.searches_samples:
            return one.group
        samples = tuple(
            Sample((), SampleStatus[row["status"].upper()], text=row["text"], extra=exact_json.loads(row["extra"]))
            for row in self._read(name, one, SEARCHED)
        )
        return replace(one.group, samples=samples)

    def _list(self, name: str) -> list[_Listed]:
        """The groups of a file."""
        if name not in self._files:
            with self._archive.open(name) as file:
                groups = by_group(file.read(columns=list(LISTED)).to_pylist())
            firsts = accumulate((len(rows) for rows in groups), initial=0)
            self._files[name] = [
                _Listed(found_group(rows, _now_ms()), first, len(rows))
                for rows, first in zip(groups, firsts, strict=False)
            ]
            if len(self._files) > FILES_KEPT:
                self._files.popitem(last=False)
        self._files.move_to_end(name)
        return self._files[name]

    def _read(self, name: str, one: _Listed, columns: Sequence[str] | None) -> list[Row]:
        """The rows of a group; reads only the file's row groups that hold these rows."""
        with self._archive.open(name) as file:
            sizes = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]
            starts = list(accumulate(sizes, initial=0))
            end = one.first + one.rows
            wanted = [at for at in range(len(sizes)) if starts[at] < end and starts[at + 1] > one.first]
            table = file.read_row_groups(wanted, columns=None if columns is None else list(columns))
        rows: list[Row] = table.slice(one.first - starts[wanted[0]], one.rows).to_pylist()
        return rows

    def _may_have_group(self, name: str, group_id: int) -> bool:
        """Whether a group's id is in a file's id range."""
        if name not in self._ids:
            with self._archive.open(name) as file:
                self._ids[name] = _range_of(file, "group_id")
        low, high = self._ids[name]
        return low <= group_id <= high

    def _tasks_of(self, name: _Name) -> set[str]:
        if name.task is not None:
            return {name.task}
        with self._archive.open(name.name) as file:
            return set(file.read(columns=["task"]).column("task").unique().to_pylist())


def _names_of(archive: Archive) -> list[_Name]:
    """The files, the newest steps first."""
    return sorted(map(_parse_name, archive.names), key=lambda one: one.step or 0, reverse=True)


def _parse_name(name: str) -> _Name:
    path = PurePosixPath(name)
    if not (named := OF_A_STEP.fullmatch(path.name)):
        return _Name(name, None, None)
    return _Name(name, path.parent.name or None, int(named[1]))


def _may_have(name: _Name, selection: Selection) -> bool:
    """Whether a file may have groups of a selection, judging by its name."""
    return (name.task is None or name.task in selection.tasks) and (
        selection.step is None or name.step in (selection.step, None)
    )


def _wanted(listed: Sequence[_Listed], selection: Selection, first: int = 0) -> list[tuple[int, FoundGroup]]:
    """A file's groups from position `first` on that are in a selection, ignoring texts, with their positions."""
    groups = enumerate(one.group for one in listed)
    return [(index, group) for index, group in groups if index >= first and _is_wanted(group, selection)]


def _is_wanted(group: FoundGroup, selection: Selection) -> bool:
    """Whether a group is in a selection, ignoring texts."""
    is_of_step = selection.step is None or (group.batch is not None and group.batch.step == selection.step)
    return is_of_step and group.task in selection.tasks and group.status in selection.statuses


def _range_of(file: Any, column: str) -> tuple[int, int]:
    """A column's least and greatest values, from the file's statistics."""
    at = file.schema.names.index(column)
    statistics = [file.metadata.row_group(group).column(at).statistics for group in range(file.num_row_groups)]
    return min((bounds.min for bounds in statistics), default=1), max((bounds.max for bounds in statistics), default=0)


def _now_ms() -> int:
    return round(time.time() * 1000)
