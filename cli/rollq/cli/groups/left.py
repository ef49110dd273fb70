"""Groups that have left a run's buffer: in the archive, or lost."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rollq.buffer.errors import ArchiveError, ConfigError
from rollq.buffer.values.rollouts import Status

if TYPE_CHECKING:
    from rollq.buffer.archive.run_archive import RunArchive
    from rollq.buffer.buffer import Buffer
    from rollq.buffer.calls.group_details import FoundGroup
    from rollq.buffer.calls.replies.tasks import Counts
    from rollq.buffer.query.conditions import Condition
    from rollq.buffer.query.plan import Range
    from rollq.buffer.query.records import GroupRecord


class LeftGroups:
    """The groups of a run that have left the buffer, in the archive at `url`; none without an archive."""

    def __init__(self, buffer: "Buffer", url: str | None) -> None:
        self._buffer, self._url = buffer, url
        self.trouble = ""
        """Why `matching` could not read the archive."""
        self.where = (
            f"; it is not in {url} either" if url else "; with url in [archive], `rollq archive` keeps such groups"
        )

    def look(self, task: str, group_id: int) -> "list[FoundGroup]":
        """A group. Raises `ConfigError`, or `ArchiveError` if the archive cannot be reached."""
        pages = self._archive.pages if self._archive else None
        return [group] if pages and (group := pages.look(task, group_id)) else []

    def of_step(self, tasks: Sequence[str], step: int) -> "list[FoundGroup]":
        """The batch of a step. Raises `ConfigError`, or `ArchiveError` if the archive cannot be reached."""
        from rollq.buffer.query.selection import Selection

        if self._archive is None or (pages := self._archive.pages) is None:
            return []
        listed: list[FoundGroup] = []
        after: str | None = ""
        while after is not None:
            page = pages.page(Selection(tasks, [Status.ARCHIVED], step), after=after)
            listed += page.groups
            after = page.after
        return [group for entry in listed for group in self.look(entry.task, entry.group_id)]

    def matching(self, query: Any) -> "Iterator[GroupRecord]":
        """The groups that match a query. If the archive cannot be reached, yields none, and `trouble` says why."""
        try:
            if self._archive:
                yield from self._archive.matching(query)
        except (ConfigError, ArchiveError) as error:
            self.trouble = str(error)

    def dropped(self, condition: "Condition") -> str:
        """How many trained groups of a condition's steps were dropped, and how to keep such groups; "" if they are
        kept, or if none were dropped."""
        from rollq.buffer.query.plan import reach_of

        reach = reach_of(condition, frozenset(self._buffer.tasks()))
        if self._archive or not reach.steps.is_bounded or Status.ARCHIVED not in reach.statuses:
            return ""
        counts = [self._buffer.counts(task) for task in sorted(reach.tasks)]
        lost = [text for each in counts if (text := _dropped_of(each, reach.steps))]
        has_archive = any(each.clock.rules.archive for each in counts)
        remedy = "name the rollq.toml with the url of the archive" if has_archive else "url in [archive] keeps them"
        return f"{'; '.join(lost)}; {remedy}" if lost else ""

    @cached_property
    def _archive(self) -> "RunArchive | None":
        from rollq.buffer.archive.run_archive import RunArchive

        return RunArchive(self._url, lambda do: do(self._buffer)) if self._url else None


def _dropped_of(counts: "Counts", steps: "Range") -> str:
    clock, dropped = counts.clock, counts.dropped.get("trained", 0)
    is_fresh = clock.rules.resume == "fresh"
    last = clock.committed if is_fresh else clock.checkpoint
    if not dropped or steps.low > last:
        return ""
    when = "as soon as it was trained" if is_fresh else "by a checkpoint"
    through = "step 1" if last == 1 else f"steps 1 to {last}"
    return f"task {counts.task}: each of the {dropped} groups of {through} was dropped {when}"
