"""The rollouts of a live run with an archive: a list of groups in the buffer that continues in the archive."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rollq.buffer.archive.pages import ArchivePages
from rollq.buffer.archive.reader import ARCHIVED_AS
from rollq.buffer.calls.group_details import FoundGroup
from rollq.buffer.errors import ArchiveError, ConfigError
from rollq.buffer.query.selection import MOST_ROWS, Candidate, Candidates, Page, Selection, ranked_page
from rollq.monitor.dashboard.live_rollouts import LiveRollouts
from rollq.monitor.dashboard.own_thread import WAIT_S, NotYet, OwnThread

LISTED_S = 5.0
"""How long a list of the archive's files stays valid."""
IN_ARCHIVE = "a"
"""Prefix of the position at which a page of archived groups begins."""


class ArchivedRollouts:
    """The groups in the buffer, then the groups only in the archive. If the archive is unreachable or silent, the page
    has a note."""

    def __init__(
        self, live: LiveRollouts, open_pages: Callable[[], ArchivePages | None], *, wait_s: float = WAIT_S
    ) -> None:
        """`open_pages` opens the archive, and returns None while nothing is archived. It raises `ConfigError` and
        `ArchiveError`, and runs in the archive's thread."""
        self._live, self._open_pages = live, open_pages
        self._thread = OwnThread("archive", wait_s)
        self._found: ArchivePages | None = None
        self._incarnation = ""
        self._listed_s = float("-inf")

    def tasks(self) -> list[str]:
        """Names of the tasks, sorted."""
        return self._live.tasks()

    def page(self, selection: Selection, *, after: str, limit: int) -> Page:
        """Some groups of a selection. Unless the selection is sorted, groups in the buffer come first."""
        limit = max(1, min(limit, MOST_ROWS))
        if not set(selection.statuses) & set(ARCHIVED_AS):
            return self._live.page(selection, after=after, limit=limit)
        try:
            return self._thread.call(lambda: self._page(selection, after, limit))
        except NotYet:
            why = f"the archive does not answer within {self._thread.wait_s:g} s; try again later"
        except (ConfigError, ArchiveError) as error:
            why = str(error)
        is_over = after.startswith(IN_ARCHIVE)
        page = Page((), 0, None) if is_over else self._live.page(selection, after=after, limit=limit)
        return page._replace(note=f"Groups that have left the buffer are missing: {why}")

    def _page(self, selection: Selection, after: str, limit: int) -> Page:
        if (pages := self._pages()) is None:
            return self._live.page(selection, after=after, limit=limit)
        if selection.is_ranked:
            return self._ranked(pages, selection, after, limit)
        return self._continued(pages, selection, after, limit)

    def look(self, task: str, group_id: int) -> FoundGroup | None:
        """A group with its samples; None if it does not exist."""
        if group := self._live.look(task, group_id):
            return group
        try:
            return self._thread.call(lambda: self._archived(task, group_id))
        except NotYet:
            wait_s = self._thread.wait_s
            raise ArchiveError(
                f"the archive does not answer within {wait_s:g} s: open this group again later"
            ) from None

    def _archived(self, task: str, group_id: int) -> FoundGroup | None:
        pages = self._pages()
        return None if pages is None else pages.look(task, group_id)

    def _continued(self, pages: ArchivePages, selection: Selection, after: str, limit: int) -> Page:
        page = Page((), 0, None)
        if not after.startswith(IN_ARCHIVE):
            page = self._live.page(selection, after=after, limit=limit)
            if page.after is not None:
                return page
            after = IN_ARCHIVE
        if len(page.groups) == limit:
            return page._replace(after=IN_ARCHIVE)
        more = pages.page(selection, after=after.removeprefix(IN_ARCHIVE), limit=limit - len(page.groups))
        groups = (*page.groups, *self._not_in_buffer(more.groups))
        return Page(groups, page.read + more.read, None if more.after is None else IN_ARCHIVE + more.after)

    def _ranked(self, pages: ArchivePages, selection: Selection, after: str, limit: int) -> Page:
        live, archived = self._live.candidates(selection), pages.candidates(selection)
        merged = sorted([*live.listed, *archived.listed], key=lambda one: one.place)

        def read(some: Sequence[Candidate], selection: Selection) -> Iterator[FoundGroup]:
            for is_archived, alike in groupby(some, key=lambda one: one.where is not None):
                if is_archived:
                    yield from self._not_in_buffer(tuple(pages.read_candidates(list(alike), selection)))
                else:
                    yield from self._live.read_candidates(list(alike), selection)

        found = Candidates(merged, live.is_partial or archived.is_partial)
        return ranked_page(found, selection, read, after=after, limit=limit)

    def _not_in_buffer(self, groups: Sequence[FoundGroup]) -> list[FoundGroup]:
        """The groups that are not in the buffer; the buffer's list already shows the others."""
        in_buffer = self._live.among([(group.task, group.group_id) for group in groups])
        return [group for group in groups if (group.task, group.group_id) not in in_buffer]

    def _pages(self) -> ArchivePages | None:
        """The archive, with files listed within the last `LISTED_S`; None while nothing is archived."""
        if time.monotonic() - self._listed_s > LISTED_S:
            incarnation = self._live.incarnation()
            if self._found is None or incarnation != self._incarnation:  # a recreated run has another archive
                self._found = self._open_pages()
                self._incarnation = incarnation
            else:
                self._found.refresh()
            self._listed_s = time.monotonic()
        return self._found
