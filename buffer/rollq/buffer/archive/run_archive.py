"""The archive of a live run: the groups that have left its buffer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from rollq.buffer.archive.archiver import MARKER, open_archive
from rollq.buffer.archive.pages import ArchivePages
from rollq.buffer.archive.reader import Archive
from rollq.buffer.errors import ArchiveError
from rollq.buffer.payloads.folders_and_buckets import Objects
from rollq.buffer.query.records import GroupRecord
from rollq.buffer.roles import MonitorBuffer


class RunArchive:
    """The files of the run's incarnation at its archive's URL, listed on first use.

    All methods raise `ConfigError` or `ArchiveError` if the archive cannot be reached: a missing archive never counts
    as empty.
    """

    def __init__(self, url: str, call: Callable[[Callable[[MonitorBuffer], Any]], Any]) -> None:
        """`call` calls a function with the run's buffer and returns the result. Archive reads happen outside `call`."""
        self.url, self._call = url, call

    @cached_property
    def archive(self) -> Archive | None:
        """The archive; None while nothing of this run is archived."""
        folder = self._call(lambda buffer: f"{buffer.run}/{buffer.incarnation}")
        objects = open_archive(self.url)
        with self._reading(objects):
            if not _has(objects, f"{folder}/{MARKER}"):
                if self._call(_has_archived):
                    raise ArchiveError(
                        f"archive.url = {self.url!r} has nothing of this run, but the run has an archive: mount the "
                        "folder, or correct the url"
                    )
                return None
            names = [name for page in objects.pages(folder, tidy=False) for name in page if name != MARKER]
            return Archive(f"{self.url}/{folder}") if names else None

    @cached_property
    def pages(self) -> ArchivePages | None:
        """Pages of the archived groups; None while nothing is archived."""
        return None if self.archive is None else ArchivePages(self.archive)

    def matching(self, query: Any) -> Iterator[GroupRecord]:
        """The groups that match `query`, by task and step."""
        if self.archive is not None:
            with self._reading(open_archive(self.url)):
                yield from self.archive.matching(query)

    @contextmanager
    def _reading(self, objects: Objects) -> Iterator[None]:
        try:
            yield
        except objects.failure as error:
            reason = str(error).partition("\n")[0]
            raise ArchiveError(f"archive.url = {self.url!r} cannot be read now: {reason}") from error


def _has_archived(buffer: MonitorBuffer) -> bool:
    return any(buffer.archive_state(task).groups for task in buffer.tasks())


def _has(objects: Objects, name: str) -> bool:
    try:
        objects.size_bytes(name)
    except FileNotFoundError:
        return False
    return True
