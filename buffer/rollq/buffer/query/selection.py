"""Selects and orders a list's groups, and builds a page of the list."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollq.buffer.calls.group_details import FoundGroup
from rollq.buffer.errors import QueryError
from rollq.buffer.query.conditions import OneSample
from rollq.buffer.query.ranking import Sort
from rollq.buffer.query.texts import texts_of
from rollq.buffer.values.rollouts import Status
from rollq.buffer.wire.sample_outcomes import SampleOutcome

MOST_ROWS = 200
"""The most groups on a page."""
SEARCHED_PER_TRIP = 4
"""The number of groups whose samples are read in one round trip."""
MOST_READ = 128
"""The most groups that a search reads for one page."""
MOST_READ_BYTES = 32 << 20
"""A search for one page stops once it has read this many bytes of samples."""


@dataclass(frozen=True, slots=True)
class Selection:
    """These tasks' groups that have one of these statuses, in this order, or in the order of `sort`.

    Further conditions limit the groups. `step`: to a train step's batch. `row`, `record`: to groups whose prompt is in
    this row of the prompts, and is stored as this text. `sample`: to groups with a sample that meets the whole
    condition. `prompt`, `text`: to groups whose prompt or samples contain this text, in upper or lower case; "" accepts
    any.
    """

    tasks: Sequence[str]
    statuses: Sequence[Status]
    step: int | None = None
    prompt: str = ""
    text: str = ""
    sample: OneSample | None = None
    sort: Sort | None = None
    row: int | None = None
    record: str = ""

    @property
    def searches_texts(self) -> bool:
        """Whether prompts or samples must contain a text."""
        return bool(self.prompt or self.text)

    @property
    def searches_samples(self) -> bool:
        """Whether samples must be read."""
        return bool(self.text)

    @property
    def is_ranked(self) -> bool:
        """Whether the numbers of all groups must be read before any is listed."""
        return self.sort is not None or self.sample is not None or self.row is not None

    def place(self, group: Any, outcomes: Sequence[SampleOutcome]) -> float | None:
        """The sort key of a group, or of its numbers, in a ranked list; None for an unwanted group."""
        if group.status not in self.statuses or self.row not in (None, group.row):
            return None
        wanted = None if self.sample is None else list(filter(self.sample.accepts, outcomes))
        if wanted == []:
            return None
        return self.sort.place(group, wanted) if self.sort else 0.0

    def holds(self, group: FoundGroup) -> bool:
        """Whether a group is wanted, with its samples if these are searched."""
        is_placed = self.place(group, group.outcomes if self.is_ranked else ()) is not None
        if not is_placed or self.record not in ("", group.fields.get("prompt")):
            return False
        if not self.searches_texts:
            return True
        texts = texts_of(group.prompt.content, group.samples)
        return self.prompt.casefold() in texts.prompt.casefold() and self.text.casefold() in texts.text.casefold()


class Page(NamedTuple):
    """Some groups without their samples, the number of groups read to find them, and the start of the next page, None
    at the end. `is_partial` is true if a ranked list did not examine all groups. `note` says what else is missing."""

    groups: tuple[FoundGroup, ...]
    read: int
    after: str | None
    is_partial: bool = False
    note: str = ""


class Candidate(NamedTuple):
    """A group that a ranked list may show, with its sort key `place`. `where` locates the group for the list's
    reader."""

    place: float
    task: str
    group_id: int
    where: Any = None


class Candidates(NamedTuple):
    """A ranked list's groups, in order. `is_partial` is true if not all groups were examined."""

    listed: Sequence[Candidate]
    is_partial: bool


def parse_after(after: str) -> tuple[int, int]:
    """Parse the start of a page: the index of the selection's set, and how many of the set's groups are on earlier
    pages. Raises `QueryError`."""
    if not re.fullmatch(r"(\d{1,9}\.\d{1,9})?", after):
        raise QueryError(f"after {after!r}: pass the value from the previous page")
    place, _, rank = after.partition(".")
    return int(place or 0), int(rank or 0)


@dataclass(slots=True)
class Filling:
    """Fills a page of up to `limit` groups. A search in prompts or texts reads at most `MOST_READ` groups, and about
    `MOST_READ_BYTES` of samples."""

    selection: Selection
    limit: int
    shown: list[FoundGroup] = field(default_factory=list)
    read: int = 0
    read_bytes: int = 0

    @property
    def next_groups(self) -> int:
        """How many groups to read next; 0 if the page is complete."""
        most = self.limit - len(self.shown)
        if self.selection.searches_texts:
            most = min(most, MOST_READ - self.read)
        if self.selection.searches_samples:
            most = min(most, SEARCHED_PER_TRIP) if self.read_bytes < MOST_READ_BYTES else 0
        return max(most, 0)

    def add(self, read: int, groups: Iterable[FoundGroup]) -> None:
        """Add the wanted groups among `groups`, the groups that still exist of `read` requested groups."""
        there = list(groups)
        self.read += read
        self.shown += filter(self.selection.holds, there)
        if self.selection.searches_samples:
            self.read_bytes += sum(int(group.fields.get("bytes") or 0) for group in there)

    def page(self, after: str | None, *, is_partial: bool = False) -> Page:
        """The page as it is now, with the start of the next page."""
        return Page(tuple(self.shown), self.read, after, is_partial)


Reader = Callable[[Sequence[Candidate], Selection], Iterable[FoundGroup]]
"""Reads some candidates' groups, in order, except groups that are gone."""


def ranked_page(found: Candidates, selection: Selection, read: Reader, *, after: str, limit: int) -> Page:
    """A page of candidates. Raises `QueryError`."""
    _, rank = parse_after(after)
    filling = Filling(selection, limit)
    while rank < len(found.listed) and (count := filling.next_groups):
        some = found.listed[rank : rank + count]
        filling.add(len(some), read(some, selection))
        rank += len(some)
    return filling.page(f"0.{rank}" if rank < len(found.listed) else None, is_partial=found.is_partial)
