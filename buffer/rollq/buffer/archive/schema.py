"""The columns of the archive's files, and their meaning.

Each row holds a sample. A column with several values per sample holds a list with an item per conversation segment.
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
"""Version of the columns and their meanings."""
VERSION_KEY, RUN_KEY, INCARNATION_KEY = b"rollq.archive.version", b"rollq.run", b"rollq.incarnation"
"""Keys in a file's metadata."""
TABLE_ROWS = 512
COLUMNS = {
    "run": "name of the run",
    "task": "name of the task, or of the shard if the task has shards",
    "group_id": "the group, unique in its task",
    "sample": "index of the sample in its group",
    "outcome": "how the group left: trained, failed, filtered, expired, ...",
    "reason": "error of a failed group",
    "step": "the train step that trained the group, or was next when it left",
    "position": "its place among its task's groups in the batch, from 0",
    "batch_groups": "number of groups of its task in the batch",
    "step_groups": "number of groups in the batch, over all tasks",
    "trainer_epoch": "epoch of the trainer that trained it; each start of a trainer increments it",
    "epoch": "epoch by which its versions were last counted",
    "status": "the sample's: `completed`, `failed`, or `aborted` and `pending` in unfinished groups",
    "finish_reason": "`stop`, `length`, `tool_calls`, `abort`, `error`",
    "reward": "the judge's reward, after penalties",
    "reward_parts": "named parts of the reward, as JSON",
    "prompt": "text, or messages as JSON",
    "answer": "the answer key, as JSON",
    "text": "the answer's text",
    "error": "why the sample failed",
    "failure": "the part that failed, such as `grader`",
    "worker": "name of the worker that generated the sample",
    "prompt_ids": "for each segment: token ids before the answer",
    "response_ids": "for each segment: token ids of the answer",
    "logprobs": "for each segment: logprobs of its tokens when sampled; NaN if an import has none",
    "loss_mask": "for each segment: false on masked tokens; null when all are trained",
    "versions": (
        "for each segment: runs of `tokens` tokens with the `epoch` and `version` of their weights; null in imports"
    ),
    "arrays": "for each segment: named arrays, as bytes in row-major order, or the `uri` of a file beside the run",
    "sampling": "parameters that were sent to the engine, as JSON",
    "tools": "schemas of tools that were sent to the engine, as JSON",
    "tool_choice": "the choice of tools that was sent to the engine, as JSON",
    "session_id": "the conversation's name",
    "extra": "free values, as JSON",
    "prompt_record": "the whole prompt as the buffer stores it, as JSON",
    "row": "the prompt's place in its file",
    "source": "source of an imported group; else null",
    "arrival": "place in the order of admission",
    "tries": "attempts since the last result",
    "interruptions": "interruptions in all",
    "oldest_version": "the version that its oldest token counts as; null without tokens",
    "floors": "how the claim of its batch counted the versions of earlier epochs",
    "token_threshold": "the staleness at which the batch left tokens out of the loss",
    "pipeline": "rewards and advantages of an experience pipeline, as JSON",
    "admitted_at": "when it was admitted: the server's time, UTC, as in the next four",
    "put_at": "when its result was stored",
    "claimed_at": "when the trainer took it",
    "committed_at": "when it was trained",
    "left_at": "when it left the buffer",
    "generate_ms": "how long its last attempt took",
    "leases": (
        "the last 16 leases, oldest first. `outcome` is put, handed_back (the try does not count), error (it "
        "counts), ran_out (the worker died or was cut off), unconfirmed (it never reached the worker), batch_ended, "
        "dropped, quarantined, or running in an export of the buffer; `parts` counts salvaged parts of samples"
    ),
}
"""The content of each column, as the reference shows it."""


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
    """Write a Parquet file of rows. The same rows always result in the same bytes."""
    columns = schema().with_metadata({VERSION_KEY: str(VERSION), RUN_KEY: run, INCARNATION_KEY: incarnation})
    with parquet().ParquetWriter(sink, columns, compression="zstd") as writer:
        for table in tables_of(rows):
            writer.write_table(table.cast(columns))


def tables_of(rows: Iterable[dict[str, Any]]) -> "Iterator[pyarrow.Table]":
    """Yield the rows in tables of at most `TABLE_ROWS` rows."""
    import pyarrow as pa

    waiting = iter(rows)
    while chunk := list(islice(waiting, TABLE_ROWS)):
        yield pa.Table.from_pylist(chunk, schema=schema())


@contextmanager
def archive_file(content: BinaryIO, name: str) -> Iterator[Any]:
    """Open an archive file as a `pyarrow.parquet.ParquetFile`.

    Raises `ArchiveError`, naming the file by `name`, if the file is damaged or is not an archive file.
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
            f"{name} has version {version} of the archive, but this rollq reads {VERSION}: use the rollq version "
            "that wrote it"
        )
