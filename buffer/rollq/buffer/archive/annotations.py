"""Reads the values that a trainer has written beside the archive, one per trained token."""

import re
import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from rollq.buffer.archive.archiver import open_archive
from rollq.buffer.archive.schema import check_version, parquet
from rollq.buffer.errors import ArchiveError

LISTED_S = 5.0
"""How long a file listing is reused, in seconds; steps trained after it are missing."""
GROUPS_KEPT = 16
"""The number of groups whose values are kept in memory."""
_NAME = re.compile(r"step-(\d+)-(\d+)-\d+-\d+\.parquet")
_OF_A_ROW = {"run", "task", "group_id", "sample", "segment", "step", "trainer_epoch", "advantage"}

Values = Sequence[float | bool | None]


@dataclass(frozen=True, slots=True)
class Annotation:
    """A trainer's values for one segment of a sample.

    Each of `values`, by name, has an item for each response token: None if the token was not trained.
    """

    advantage: float | None = None
    values: Mapping[str, Values] = field(default_factory=dict)


Annotations = Mapping[tuple[int, int], Annotation]
"""(Sample index, segment index) -> the values that were written."""


class AnnotationReader:
    """Reads the annotations of one run incarnation. Only one thread may use a reader."""

    def __init__(self, url: str, run: str, incarnation: str) -> None:
        """`url` is the archive's URL; each run has a folder there. Raises `ConfigError` if `url` is unavailable."""
        parquet()
        self._objects = open_archive(url)
        self._folder = f"{run}+annotations/{incarnation}"
        self._listed_s = float("-inf")
        self._names: dict[int, list[str]] = {}
        self._kept: OrderedDict[tuple[str, int, int], Annotations] = OrderedDict()

    def of_group(self, task: str, group_id: int, step: int) -> Annotations:
        """Return the values that a step's last trainer wrote for a group; empty if that trainer wrote none.

        Raises `ArchiveError`, and any error from the file system or the bucket.
        """
        key = task, group_id, step
        if key not in self._kept:
            if not (found := self._read(task, group_id, self._names_of(step))):
                return {}  # the trainer may not have written it yet
            self._kept[key] = found
            if len(self._kept) > GROUPS_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _names_of(self, step: int) -> list[str]:
        if time.monotonic() - self._listed_s > LISTED_S:
            names: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
            for page in self._objects.pages(self._folder, tidy=False):
                for name in page:
                    if named := _NAME.fullmatch(name):
                        names[int(named[1])][int(named[2])].append(name)
            self._names = {one: sorted(epochs[max(epochs)]) for one, epochs in names.items()}
            self._listed_s = time.monotonic()
        return self._names.get(step, [])

    def _read(self, task: str, group_id: int, names: Sequence[str]) -> Annotations:
        annotations: dict[tuple[int, int], Annotation] = {}
        for name in names:
            for row in self._rows(name, task, group_id):
                key = row["sample"], row["segment"]
                former = annotations.get(key, Annotation())
                values = {name: value for name, value in row.items() if name not in _OF_A_ROW}
                annotations[key] = Annotation(row["advantage"], {**former.values, **values})
        return annotations

    def _rows(self, name: str, task: str, group_id: int) -> list[dict[str, Any]]:
        wanted = [("task", "=", task), ("group_id", "=", group_id)]
        with self._objects.open(f"{self._folder}/{name}") as content:
            schema = parquet().read_schema(content)
            check_version(schema.metadata, name)
            content.seek(0)
            rows: list[dict[str, Any]] = parquet().read_table(content, filters=wanted).to_pylist()
        return rows


def root_of(url: str, names: Sequence[str], run: str, incarnation: str) -> str:
    """The URL of the whole archive; `url` may name a folder in the archive, with the files `names`.

    Raises `ArchiveError` for files from `rollq export`, which have no annotations beside them.
    """
    path = PurePosixPath(names[0]).parent
    above = PurePosixPath(url.removeprefix("s3:/"))
    parts = [*above.parts, *path.parts]
    if parts[-3:-1] != [run, incarnation] or len(path.parts) > 3:
        raise ArchiveError(f"{url} is not in an archive with a folder for each run, where trainers write")
    return url if len(path.parts) == 3 else url.rstrip("/").rsplit("/", 3 - len(path.parts))[0]
