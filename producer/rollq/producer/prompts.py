"""Prompts at rest: the rows of a file or folder, read lazily and in any order, each turned into a `Prompt`.

`prompts` of the task      read by
`*.parquet`, `*.arrow`     the package `datasets` (`pip install 'rollq[datasets]'`)
a folder                   the same: what `Dataset.save_to_disk` wrote
anything else              `JsonLines`, one JSON object per line

What becomes of a row's columns is the same for all of them: see `rollq.producer.columns`.

Invariant: row numbers depend only on the bytes of the files, so that every producer that reads the same ones sees the
same rows. The sampler's order and the statistics per prompt rely on it.
"""

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rollq.buffer.errors import ConfigError, InvalidPrompt
from rollq.buffer.rollouts import Prompt
from rollq.producer.columns import Columns
from rollq.producer.jsonl import JsonLines
from rollq.producer.settings import PromptSettings

DATASET_SUFFIXES = frozenset({".parquet", ".arrow"})


class Table(Protocol):
    """Rows of named columns, in any order; a row's values are those that JSON knows."""

    @property
    def rows(self) -> int: ...

    def place(self, row: int) -> str:
        """Where a row is, for people."""
        ...

    def read(self, row: int) -> dict[str, Any]:
        """Raises `ValueError` for a row that cannot be read."""
        ...

    def close(self) -> None: ...


class PromptFile:
    """The prompts of one task. The constructor touches no file; entering it opens and indexes (`ConfigError`)."""

    def __init__(self, task: PromptSettings) -> None:
        self.path = task.prompts
        self._columns = Columns.of(task)
        self._table: Table | None = None

    def __enter__(self) -> Self:
        try:
            self._table = open_table(self.path, self._columns)
        except OSError as error:
            raise ConfigError(f"prompts file {str(self.path)!r} cannot be read: {error.strerror or error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._table is not None:
            self._table.close()
            self._table = None

    @property
    def rows(self) -> int:
        """Number of rows, usable or not."""
        return self._opened.rows

    def prompt(self, row: int) -> Prompt:
        """Prompt of row `row` (from 0). Raises `InvalidPrompt` with the file and the line or row."""
        table = self._opened
        try:
            return replace(self._columns.prompt(table.read(row)), row=row)
        except ValueError as error:
            raise InvalidPrompt(f"{table.place(row)}: {error}") from error

    @property
    def _opened(self) -> Table:
        if self._table is None:
            raise RuntimeError("PromptFile is used outside of its with block")
        return self._table


def open_table(path: Path, columns: Columns) -> Table:
    """The table at a path, whatever its format. Raises `OSError` and `ConfigError`."""
    if path.is_dir() or path.suffix in DATASET_SUFFIXES:
        from rollq.producer.hf_datasets import DatasetRows

        return DatasetRows.open(path, columns)
    return JsonLines.open(path)
