"""Reads an archive: groups by query, and a run's batches."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from rollq.buffer.archive.archiver import open_archive
from rollq.buffer.archive.rows import Row, TrainedGroup, content_of, group_of, letters_of, outcomes_of, sample_of
from rollq.buffer.archive.schema import INCARNATION_KEY, RUN_KEY, archive_file, parquet
from rollq.buffer.common.means import mean_of
from rollq.buffer.errors import ArchiveError
from rollq.buffer.query.conditions import Condition
from rollq.buffer.query.language import parse_query
from rollq.buffer.query.plan import steps_of
from rollq.buffer.query.records import GroupRecord
from rollq.buffer.query.texts import GroupTexts, texts_of
from rollq.buffer.rules.staleness import staleness
from rollq.buffer.values.rollouts import Status
from rollq.buffer.wire.sample_outcomes import decode_outcomes

SUFFIX = ".parquet"
OF_A_STEP = re.compile(r"step-(\d+)-\d+\.parquet")
"""The name of an archive file. Each file has the groups of one task and step."""
_STATUS: Mapping[str, Status] = {
    "trained": Status.ARCHIVED,
    "failed": Status.FAILED,
    "filtered": Status.FILTERED,
    "expired": Status.EXPIRED,
}
_OF_RECORDS = (
    "task", "group_id", "outcome", "reason", "step", "status", "reward", "error", "failure", "finish_reason",
    "versions", "oldest_version", "arrival", "tries", "row",
)  # fmt: skip
"""The columns of `GroupRecord`."""
ARCHIVED_AS = (*_STATUS.values(), Status.LEAVING)
"""The statuses by which archived groups are found."""


def status_of(outcome: str) -> Status:
    """The status by which a group with this outcome is found."""
    return _STATUS.get(outcome, Status.LEAVING)


class Archive:
    """An archive's files, by name, in a folder or in a bucket at `s3://bucket/prefix`."""

    def __init__(self, url: str) -> None:
        """Raises `ConfigError` if the folder does not exist, `ArchiveError` if it has no archive files."""
        parquet()
        self.url = url if url.startswith("s3:") else str(Path(url).absolute())
        self._objects = open_archive(self.url)
        self.names: list[str] = []
        self.refresh()
        if not self.names:
            raise ArchiveError(f"{url} has no file of an archive: `rollq archive` writes them")

    def refresh(self) -> None:
        """List the files again. Raises `ArchiveError` while the folder or bucket is unavailable."""
        pages = self._objects.pages("", tidy=False)  # a user names the folder, which may have hidden files
        try:
            self.names = sorted(name for page in pages for name in page if _is_of_groups(name))
        except self._objects.failure as error:
            raise ArchiveError(f"{self.url} cannot be read now: {str(error).partition(chr(10))[0]}") from error

    def rows(self, name: str) -> list[Row]:
        """The rows of a file. Raises `ArchiveError` if this rollq cannot read the file."""
        with self.open(name) as file:
            read: list[Row] = file.read().to_pylist()
        return read

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        """Open a file as a `pyarrow.parquet.ParquetFile`. Raises `ArchiveError` if this rollq cannot read it."""
        with self._objects.open(name) as content, archive_file(content, f"{self.url}/{name}") as file:
            yield file

    def groups(self, query: Any) -> Iterator[list[Row]]:
        """The rows of each group that matches `query`; see `rollq.buffer.query.language`."""
        condition = parse_query(query)
        for name in self._names_for(condition):
            for group in by_group(self.rows(name)):
                if condition.holds(_record(group), _texts(group) if condition.searches_texts else None):
                    yield group

    def matching(self, query: Any) -> Iterator[GroupRecord]:
        """The numbers of each group that matches `query`. Reads few columns unless it searches texts."""
        condition = parse_query(query)
        if condition.searches_texts:
            yield from map(_record, self.groups(query))
            return
        for name in self._names_for(condition):
            with self.open(name) as file:
                rows = file.read(columns=list(_OF_RECORDS)).to_pylist()
            yield from filter(condition.holds, map(_record, by_group(rows)))

    def _names_for(self, condition: Condition) -> Iterator[str]:
        """The files that, judging by their names, may have groups that match a condition."""
        steps = steps_of(condition)
        for name in self.names:
            named = OF_A_STEP.fullmatch(Path(name).name)
            if named is None or steps.low <= int(named[1]) <= steps.high:
                yield name

    def run(self) -> tuple[str, str]:
        """The name and the incarnation of the archive's run.

        Raises `ArchiveError` if the archive has several runs.
        """
        one_of_each_folder = {Path(name).parent: name for name in self.names}.values()  # reading all may take hours
        runs = {self._run_of(name) for name in one_of_each_folder}
        if len(runs) > 1:
            several = ", ".join(f"{run}/{incarnation}" for run, incarnation in sorted(runs))
            raise ArchiveError(f"{self.url} has the archives of several runs: name the folder of one: {several}")
        return runs.pop()

    def _run_of(self, name: str) -> tuple[str, str]:
        with self.open(name) as file:
            metadata = file.schema_arrow.metadata
        return metadata[RUN_KEY].decode(), metadata[INCARNATION_KEY].decode()

    def steps(self) -> dict[int, list[str]]:
        """Step -> files with this step in their name. Raises `ArchiveError` for a file from `rollq export`."""
        files: dict[int, list[str]] = defaultdict(list)
        for name in self.names:
            if not (named := OF_A_STEP.fullmatch(Path(name).name)):
                raise ArchiveError(f"{self.url}/{name} is not named as `rollq archive` names the files of steps")
            files[int(named[1])].append(name)
        return dict(sorted(files.items()))

    def batch(self, step: int, names: Sequence[str]) -> list[TrainedGroup]:
        """Return the groups of a step's batch, in order, from the step's files; none if the step trained nothing.

        Leaves out groups without a position, which were trained before their task had an archive. If a step was trained
        again after a crash, the last trainer's batch counts. Raises `ArchiveError` if the archive lacks groups of the
        batch.
        """
        trained: list[TrainedGroup] = []
        for task, rows_of_task in self._last_trained(names):
            groups = sorted(map(group_of, by_group([*rows_of_task])), key=attrgetter("position"))
            wanted = groups[0].batch_groups
            if [group.position for group in groups] != list(range(wanted)):
                raise ArchiveError(
                    f"{self.url}: step {step} trained {wanted} groups of task {task!r}, but only {len(groups)} are in "
                    "the archive: wait until the archiver has written the rest, or read fewer steps"
                )
            trained += groups
        if trained and len(trained) != trained[0].step_groups:
            raise ArchiveError(
                f"{self.url}: step {step} trained {trained[0].step_groups} groups of all tasks, but only "
                f"{len(trained)} are in the archive: a task's file is missing or not written yet, or a task has "
                "archive = false"
            )
        return trained

    def _last_trained(self, names: Sequence[str]) -> "groupby[str, Row]":
        """These files' rows that have a position, as the last trainer trained them, by task."""
        rows = [row for name in names for row in self.rows(name) if row["position"] is not None]
        last = max((row["trainer_epoch"] for row in rows), default=0)
        kept = [row for row in rows if row["trainer_epoch"] == last]
        return groupby(sorted(kept, key=itemgetter("task")), key=itemgetter("task"))


def _is_of_groups(name: str) -> bool:
    """Whether a file belongs to the archive itself, not to a trainer's annotations beside it."""
    return name.endswith(SUFFIX) and "+annotations/" not in f"{name}/"


def by_group(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each group; they are consecutive in a file."""
    return [list(group) for _, group in groupby(rows, key=lambda row: (row["task"], row["group_id"]))]


def _record(rows: Sequence[Row]) -> GroupRecord:
    """A group as queries see it, with its staleness at its step."""
    first = rows[0]
    oldest = first["oldest_version"]
    return GroupRecord(
        uid=first["group_id"],
        task=first["task"],
        status=status_of(first["outcome"]).value,
        staleness=staleness(first["step"], [] if oldest is None else [oldest]),
        arrival=first["arrival"],
        reward=mean_of(row["reward"] for row in rows),
        tries=first["tries"],
        error=first["reason"] or "",
        step=first["step"] if first["outcome"] == "trained" else None,
        listed_step=first["step"],
        row=first["row"],
        samples=decode_outcomes(outcomes_of(rows), letters_of(rows)),
    )


def _texts(rows: Sequence[Row]) -> GroupTexts:
    return texts_of(content_of(rows[0]["prompt_record"].encode()), map(sample_of, rows))
