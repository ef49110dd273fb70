"""Exports groups, from the buffer or from an archive, with the columns of the archive."""

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from rollq.buffer.archive.rows import Row, rows_of
from rollq.buffer.archive.schema import tables_of, write_rows
from rollq.buffer.buffer import Buffer
from rollq.buffer.common.atomic_files import fsync_path
from rollq.buffer.common.writing import writing_to
from rollq.buffer.errors import ConfigError


def groups_in(buffer: Buffer, query: Any) -> Iterator[list[Row]]:
    """The rows of each group in the buffer that matches `query`, except groups that leave during the export."""
    for task, records in groupby(buffer.query(query), key=lambda record: record.task):
        for stored in buffer.read_stored(task, [record.uid for record in records]):
            step = int(stored.fields.get("trained_step") or stored.fields["step"])
            yield rows_of(buffer.run, stored, step)


def export(groups: Iterable[list[Row]], path: Path, form: str) -> int:
    """Write groups to a new file, which appears complete or not at all; returns the number of groups.

    Raises `ConfigError` if the file exists or cannot be written.
    """
    if path.exists():
        raise ConfigError(f"--to {path}: the file exists; remove it, or name another")
    counted = _Counted(groups)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with writing_to("--to", path):
        try:
            with unfinished.open("wb") as file:
                _WRITERS[form](file, counted)
            unfinished.replace(path)
            fsync_path(path.absolute().parent)
        finally:
            unfinished.unlink(missing_ok=True)
    return counted.groups


class _Counted:
    """Yields the rows of groups, and counts the groups."""

    def __init__(self, groups: Iterable[list[Row]]) -> None:
        self._waiting = groups
        self.groups = 0

    def __iter__(self) -> Iterator[Row]:
        for rows in self._waiting:
            self.groups += 1
            yield from rows


def _write_parquet(file: BinaryIO, rows: Iterable[Row]) -> None:
    write_rows(file, "", "", rows)


def _write_lines(file: BinaryIO, rows: Iterable[Row]) -> None:
    """Write a JSON object per row. Times are strings, and array bytes are in base64."""
    for table in tables_of(rows):
        for row in table.to_pylist():
            file.write(orjson.dumps(row, default=_encode_bytes, option=orjson.OPT_APPEND_NEWLINE))


def _encode_bytes(value: Any) -> str:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is not a value of a row")


def read_lines_row(row: Row) -> Row:
    """Decode a row, arrays included, from its line of JSON. Raises `ValueError` if an array's bytes are invalid."""
    segments = [[{**array, "data": _decode_bytes(array["data"])} for array in arrays] for arrays in row["arrays"]]
    return {**row, "arrays": segments}


def _decode_bytes(text: str | None) -> bytes | None:
    return None if text is None else b64decode(text, validate=True)


_WRITERS: dict[str, Callable[[BinaryIO, Iterable[Row]], None]] = {"jsonl": _write_lines, "parquet": _write_parquet}
FORMATS = tuple(_WRITERS)
