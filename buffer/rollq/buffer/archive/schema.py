"""The columns of the archive's files. docs/guide/archive.md describes them; a test compares the two.

A row is a sample. A column with several values per sample is a list with an item for each segment of the conversation.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO

from rollq.buffer.errors import ArchiveError, ConfigError

if TYPE_CHECKING:
    import pyarrow

VERSION = 3
"""Of the columns and their meaning."""
VERSION_KEY, RUN_KEY, INCARNATION_KEY = b"rollq.archive.version", b"rollq.run", b"rollq.incarnation"
"""Of the metadata of a file."""
TABLE_ROWS = 512


def parquet() -> Any:
    """`pyarrow.parquet`. Raises `ConfigError` without it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"an archive needs pyarrow ({error}): pip install 'rollq[archive]'") from error
    return pyarrow.parquet


@cache
def schema() -> "pyarrow.Schema":
    """The columns, without metadata."""
    parquet()
    import pyarrow as pa

    text, number, ids, time = pa.string(), pa.int64(), pa.list_(pa.int32()), pa.timestamp("ms", tz="UTC")
    span = pa.struct([("epoch", pa.int64()), ("version", pa.int64()), ("tokens", pa.int64())])
    array = pa.struct(
        [("name", text), ("dtype", text), ("shape", pa.list_(number)), ("data", pa.binary()), ("uri", text),
         ("sha256", text)]
    )  # fmt: skip
    lease = pa.struct(
        [("attempt", number), ("worker", text), ("version", number), ("leased_at", time), ("ended_at", time),
         ("outcome", text), ("parts", number)]
    )  # fmt: skip
    return pa.schema(
        [
            ("run", text), ("task", text), ("group_id", number), ("sample", pa.int32()), ("outcome", text),
            ("reason", text), ("step", number), ("position", pa.int32()), ("batch_groups", pa.int32()),
            ("step_groups", pa.int32()), ("trainer_epoch", number), ("epoch", number), ("status", text),
            ("finish_reason", text), ("reward", pa.float64()), ("reward_parts", text), ("prompt", text),
            ("answer", text), ("text", text), ("error", text), ("failure", text), ("worker", text),
            ("prompt_ids", pa.list_(ids)),
            ("response_ids", pa.list_(ids)), ("logprobs", pa.list_(pa.list_(pa.float32()))),
            ("loss_mask", pa.list_(pa.list_(pa.bool_()))), ("versions", pa.list_(pa.list_(span))),
            ("arrays", pa.list_(pa.list_(array))), ("sampling", text), ("tools", text), ("tool_choice", text),
            ("session_id", text), ("extra", text), ("prompt_record", text), ("row", number), ("source", text),
            ("arrival", number), ("tries", number), ("interruptions", number), ("oldest_version", number),
            ("floors", text), ("token_threshold", number), ("pipeline", text), ("admitted_at", time), ("put_at", time),
            ("claimed_at", time), ("committed_at", time), ("left_at", time), ("generate_ms", number),
            ("leases", pa.list_(lease)),
        ]
    )  # fmt: skip


def write_rows(sink: BinaryIO, run: str, incarnation: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write a Parquet file of rows. The same rows give the same bytes."""
    columns = schema().with_metadata({VERSION_KEY: str(VERSION), RUN_KEY: run, INCARNATION_KEY: incarnation})
    with parquet().ParquetWriter(sink, columns, compression="zstd") as writer:
        for table in tables_of(rows):
            writer.write_table(table.cast(columns))


def tables_of(rows: Iterable[dict[str, Any]]) -> "Iterator[pyarrow.Table]":
    """Rows in tables of `TABLE_ROWS` at most."""
    import pyarrow as pa

    waiting = iter(rows)
    while chunk := list(islice(waiting, TABLE_ROWS)):
        yield pa.Table.from_pylist(chunk, schema=schema())


@contextmanager
def archive_file(content: BinaryIO, name: str) -> Iterator[Any]:
    """A file of an archive as a `pyarrow.parquet.ParquetFile`.

    Raises `ArchiveError`, with the `name`, for any other file, and for one that is damaged.
    """
    with _parsing(name), parquet().ParquetFile(content) as file:
        _check_columns(file.schema_arrow, name)
        yield file


@contextmanager
def _parsing(name: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ArchiveError(
            f"{name} is damaged, or is not a Parquet file: {str(error).partition(chr(10))[0]}; restore it from a copy, "
            "or remove it to read the others"
        ) from error


def _check_columns(found: "pyarrow.Schema", name: str) -> None:
    check_version(found.metadata, name)
    if missing := [column for column in schema().names if column not in found.names]:
        raise ArchiveError(
            f"{name} is not a file of an archive: it has no column {missing[0]!r}. It may be a file of annotations; "
            "name the folder of the archive"
        )


def check_version(metadata: Mapping[bytes, bytes] | None, name: str) -> None:
    """Raise `ArchiveError` unless a file with this metadata can be read."""
    version = (metadata or {}).get(VERSION_KEY, b"").decode(errors="replace")[:40]
    if not version:
        raise ArchiveError(f"{name} is not a file of an archive: it has no {VERSION_KEY.decode()} in its metadata")
    if version != str(VERSION):
        raise ArchiveError(
            f"{name} has version {version} of the archive, this rollq reads {VERSION}: use the rollq that wrote it"
        )
