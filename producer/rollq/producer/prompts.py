"""The prompts of a file or folder: rows are read lazily in any order, and converted to `Prompt`.

`prompts` of the task      read by
`*.parquet`, `*.arrow`     the package `datasets` (`pip install 'rollq[datasets]'`)
a folder                   the same; it was written by `Dataset.save_to_disk`, or has `*.parquet` files
anything else              `JsonLines`, one JSON object per line

`rollq.producer.columns` maps the columns of a row to a prompt, in the same way for all formats.

Invariant: row numbers depend only on the bytes of the files, so producers with equal files see equal rows. The
sampler's order and the statistics per prompt rely on it.
"""

import math
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from rollq.buffer.common.columns import look_up
from rollq.buffer.errors import ConfigError, InvalidPrompt
from rollq.buffer.values.rollouts import Prompt
from rollq.buffer.wire.prompts import prompt_problem
from rollq.producer.columns import Columns
from rollq.producer.jsonl import JsonLines
from rollq.producer.prompt_images import ImageFiles
from rollq.producer.settings import PromptSettings

LOOKED_AT = 100
"""How many of a file's first rows are searched for the columns in the settings."""
READING = set(PromptSettings.model_fields) - {
    "prompts", "max_prompt_tokens", "max_bad_rows", "on_prompts_changed",
    "image_folders",
}  # fmt: skip
"""The settings that control the conversion of a row to a prompt."""
DATASET_SUFFIXES = frozenset({".parquet", ".arrow"})


class Table(Protocol):
    """Rows of named columns that can be read in any order. Their values are JSON types."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        ...

    @property
    def fingerprint(self) -> str:
        """The digest of the content, independent of the file's path."""
        ...

    @property
    def fills_gaps(self) -> bool:
        """Whether objects get nulls for names in their column's type that they lack."""
        ...

    def place(self, row: int) -> str:
        """The location of a row, for error messages."""
        ...

    def read(self, row: int) -> dict[str, Any]:
        """Return row `row` (from 0). Raises `ValueError` if it cannot be read."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class ReadRow(Protocol):
    """Reads a prompt's answer for its judge. Raises `ValueError` for a prompt that the judge cannot use."""

    @property
    def identity(self) -> str:
        """Identifies the judges and their selection, as far as these decide which rows are usable."""
        ...

    def __call__(self, prompt: Prompt, /) -> object:
        """Read a prompt."""
        ...


class PromptFile:
    """The prompts of one task. Entering the context opens and indexes the file; raises `ConfigError` if that fails."""

    def __init__(self, task: PromptSettings, read_row: ReadRow | None = None) -> None:
        """`read_row` raises `ValueError` for a prompt that the task's judge cannot use."""
        self.settings = task
        self.path = task.prompts
        self._columns = Columns.from_task(task)
        self._read_row = read_row
        self._images = ImageFiles(task.prompts.parent, task.image_folders)
        self._image_options = task.image_options
        self._table: Table | None = None

    def __enter__(self) -> Self:
        try:
            self._table = open_table(self.path, self._columns)
        except OSError as error:
            raise ConfigError(f"prompts = {str(self.path)!r} cannot be read: {error.strerror or error}") from error
        try:
            self._check_encoding(self._table)
            self._check_columns(self._table)
        except BaseException:
            self._table.close()
            raise
        return self

    def _check_encoding(self, table: Table) -> None:
        """Raise `ConfigError` if more of the first rows are not UTF-8 than may be unusable. One alone is reported when
        it is reached."""
        bad = table.not_utf8(LOOKED_AT) if isinstance(table, JsonLines) else []
        if len(bad) > max(1, self.settings.max_bad_rows * min(table.rows, LOOKED_AT)):
            raise ConfigError(
                f"prompts = {str(self.path)!r} is not UTF-8: {bad[0]}; convert it, as with iconv -f LATIN1 -t UTF-8"
            )

    def _check_columns(self, table: Table) -> None:
        """Raise `ConfigError` if a setting names a column that none of the first rows has."""

        def first_rows() -> list[dict[str, Any]]:
            rows = []
            for row in range(min(table.rows, LOOKED_AT)):
                with suppress(ValueError):  # reported when the row is reached
                    rows.append(table.read(row))
            return rows

        if problem := self._columns.absent(first_rows):
            raise ConfigError(f"{problem} (in {str(self.path)!r})")

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

    @property
    def fingerprint(self) -> str:
        """The digest of the bytes in the file, or in the folder's files."""
        return self._opened.fingerprint

    @property
    def account(self) -> str:
        """The digest of the file, of the settings for converting rows, and of the answers' readers."""
        settings = self.settings.model_dump_json(include=READING)
        reader = self._read_row.identity if self._read_row else ""
        return blake2b(f"{self.fingerprint} {reader} {settings}".encode(), digest_size=16).hexdigest()

    def place(self, row: int) -> str:
        """The location of row `row` (from 0): its file, and its line or row."""
        return self._opened.place(row)

    def prompt(self, row: int) -> Prompt:
        """Return the prompt of row `row` (from 0). Raises `InvalidPrompt` with the file and the line or row.

        Raises `ConfigError` if images need a package that is missing.
        """
        table = self._opened
        try:
            prompt, named = self._columns.prompt(table.read(row), fills_gaps=table.fills_gaps)
            images = tuple(map(self._images.resolve, named))
            prompt = replace(prompt, row=row, images=images, image_options=self._image_options if images else {})
            if problem := prompt_problem(prompt):
                raise ValueError(problem)
            if self._read_row is not None:
                self._read_row(prompt)
            return prompt
        except ConfigError:
            raise
        except ValueError as error:  # includes unreadable images
            raise InvalidPrompt(f"{table.place(row)}: {error}") from error

    def numbers(self, column: str) -> npt.NDArray[np.float64]:
        """The numbers in a column, float64 [rows]; NaN for an unreadable row.

        Raises `ConfigError` for a row without a number there.
        """
        table, values = self._opened, np.full(self.rows, np.nan)
        for row in range(self.rows):
            try:
                value = look_up(table.read(row), column)
            except ValueError:  # reported when the row is reached
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
                raise ConfigError(
                    f'prompt_order = {{ by = "{column}" }}: {table.place(row)}: expected a number, not {value!r:.40}'
                )
            values[row] = value
        return values

    @property
    def _opened(self) -> Table:
        if self._table is None:
            raise RuntimeError("PromptFile is used outside its with block")
        return self._table


def open_table(path: Path, columns: Columns) -> Table:
    """Open the table at a path, in any supported format. Raises `OSError` and `ConfigError`."""
    if path.is_dir() or path.suffix in DATASET_SUFFIXES:
        from rollq.producer.hf_datasets import DatasetRows

        return DatasetRows.open(path, columns)
    return JsonLines.open(path)
