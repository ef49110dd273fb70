"""The archiver: when groups leave the buffer, it writes them to files, then releases them.

A portion of groups is fixed in the buffer before it is written, and its groups never change. So an archiver that
replaces a dead one writes the same file again, under the same name.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from io import BytesIO
from typing import TypeVar

from rollq.buffer.archive.rows import rows_of
from rollq.buffer.archive.schema import parquet, write_rows
from rollq.buffer.calls.archiving import MAX_PORTION_GROUPS, Portion, StoredGroup
from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import ArchiveError, ConfigError, ServerError, StoreLost
from rollq.buffer.payloads.folders_and_buckets import Bucket, Folder, Objects
from rollq.buffer.roles import ArchiverBuffer
from rollq.buffer.store.connection import wait_out
from rollq.buffer.values.rollouts import Status

T = TypeVar("T")

log = logging.getLogger(__name__)

POLL_S = 1.0
WAIT_S = 60.0
"""How long dropped groups wait for other groups of the same step, in seconds."""
PORTION_BYTES = 256 << 20
"""Approximate limit for a portion's frames, since its file is made in memory."""
MARKER = "_this+run"
"""A name that no task can have and that pandas skips. If the marker is missing, so is the run's folder."""


def open_archive(url: str) -> Objects:
    """The objects at `archive.url`. Raises `ConfigError` unless it is an existing folder or a bucket."""
    return Bucket(url, "archives") if url.startswith("s3:") else Folder(url, "archive.url", fsync="always")


def wait_for_run(buffer: ArchiverBuffer, stop: threading.Event) -> None:
    """Wait until the first producer, worker or trainer has created the run, or `stop` is set."""
    logged = LogOnce(log)
    while not stop.is_set():
        try:
            buffer.incarnation  # noqa: B018 - read once
            return
        except StoreLost as error:
            logged.warning("run", "waiting for run %r: %s", buffer.run, error)
            stop.wait(POLL_S)


class Archiver:
    """Archives the groups that leave a run. Any number of archivers may work concurrently."""

    def __init__(self, buffer: ArchiverBuffer, url: str, *, wait_s: float = WAIT_S) -> None:
        """Raises `ConfigError` if the run was previously archived to a different folder or bucket."""
        parquet()
        self._buffer = buffer
        self._name = f"archive.url = {url!r}"
        self._objects = open_archive(url)
        self._wait_s = wait_s
        self._archiver = secrets.token_hex(8)
        self._folder = f"{buffer.run}/{buffer.incarnation}"
        self._mark()
        buffer.wait_out_outages()

    def run(self, stop: threading.Event) -> None:
        """Archive until `stop` is set."""
        while not stop.is_set():
            if not self.archive_once(stop):
                stop.wait(POLL_S)

    def finish(self, stop: threading.Event) -> None:
        """Once the run is over, archive all groups that are leaving or are kept for audit.

        Waits while another archiver is working or has just died, and while the buffer is being saved. Raises
        `ArchiveError` if everything is archived except trained groups that no checkpoint covers.
        """
        self._wait_s = 0.0
        while not stop.is_set():
            for task in self._buffer.tasks():
                self._buffer.leave_audit(task)
            if not self.archive_once(stop):
                if not any(map(self._waits, self._buffer.tasks())):
                    self._check_covered()
                    return
                stop.wait(POLL_S)

    def _waits(self, task: str) -> bool:
        """Whether a finished run's task still has groups to archive."""
        counts = self._buffer.counts(task)
        audited = (Status.FAILED, Status.FILTERED) if counts.clock.rules.archive else ()
        return any(counts.statuses[status] for status in (Status.LEAVING, *audited))

    def _check_covered(self) -> None:
        """Raise `ArchiveError` while a trainer may still return to trained groups."""
        counts = [self._buffer.counts(task) for task in self._buffer.tasks()]
        uncovered = {each.task: each.statuses[Status.ARCHIVED] for each in counts if each.clock.rules.archive}
        if groups := ", ".join(f"{count} of task {task!r}" for task, count in uncovered.items() if count):
            raise ArchiveError(
                f"run {self._buffer.run!r}: trained groups are not archived yet ({groups}), because no checkpoint "
                "covers their steps. Start `rollq train` again, which saves a checkpoint when it ends or is stopped; "
                "then repeat this command. `rollq runs delete` would lose the groups"
            )

    def archive_once(self, stop: threading.Event) -> int:
        """Archive one portion of each task that has one; return the number of groups.

        Waits, and logs the reason, while the server, the folder or the bucket is unavailable or full.
        """
        try:
            return sum(self._archive_portion(task, stop) for task in self._buffer.tasks())
        except ServerError:
            if stop.is_set():
                return 0
            raise

    def _take(self, task: str, trouble: str = "") -> Portion | None:
        mean_bytes = self._buffer.counts(task).mean_bytes
        most = max(1, min(MAX_PORTION_GROUPS, int(PORTION_BYTES / max(1.0, mean_bytes))))
        return self._buffer.take_to_archive(task, self._archiver, most=most, wait_s=self._wait_s, trouble=trouble)

    def _archive_portion(self, task: str, stop: threading.Event) -> int:
        portion = self._take(task)
        if portion is None:
            return 0
        name = f"{self._folder}/{file_name(portion)}"
        content = self._encode(portion)
        if not self._buffer.is_waiting(portion):  # another archiver wrote it: groups were gone when this one read them
            return 0
        self._put(task, name, content)
        while not self._buffer.forget_archived(portion):
            log.info("task %s: a snapshot is being taken; archived groups stay in the buffer until it is done", task)
            if stop.wait(POLL_S):
                return 0
        log.info("task %s: %d groups of step %d are in %s", task, len(portion.ids), portion.step, name)
        return len(portion.ids)

    def _encode(self, portion: Portion) -> bytes:
        groups = self._buffer.read_stored(portion.task, portion.ids)
        return encode_file(self._buffer.run, self._buffer.incarnation, portion, groups)

    def _mark(self) -> None:
        """Leave a marker that reveals whether the folder is mounted."""
        marker = f"{self._folder}/{MARKER}"
        try:
            self._wait_out(lambda: self._objects.size_bytes(marker))
        except FileNotFoundError:
            if any(self._buffer.archive_state(task).groups for task in self._buffer.tasks()):
                raise ConfigError(
                    f"{self._name} has nothing of this run, but the run has an archive: give every archiver the same "
                    "folder or bucket"
                ) from None
            self._wait_out(lambda: self._objects.put(marker, b""))

    def _put(self, task: str, name: str, value: bytes) -> None:
        """Write a file. While this fails, record the reason in the buffer and keep other archivers off the portion."""

        def put() -> None:
            try:
                self._objects.check_mounted(f"{self._folder}/{MARKER}")
                self._objects.put(name, value)
            except self._objects.failure as error:
                self._take(task, f"{self._name}: {error}".partition("\n")[0])
                raise

        self._wait_out(put)

    def _wait_out(self, do: Callable[[], T]) -> T:
        objects = self._objects
        return wait_out(do, self._buffer.patience, name=self._name, fails=objects.failure, explain=objects.explain)


def file_name(portion: Portion) -> str:
    """The name of a portion's file in its run's folder."""
    return f"{portion.task}/step-{portion.step:08d}-{portion.number:06d}.parquet"


def encode_file(run: str, incarnation: str, portion: Portion, groups: Iterable[StoredGroup]) -> bytes:
    """Encode groups as a Parquet file. The same groups always result in the same bytes."""
    sink = BytesIO()
    write_rows(sink, run, incarnation, (row for group in groups for row in rows_of(run, group, portion.step)))
    return sink.getvalue()
