"""Values that a trainer adds to the archive, one per token of a batch, in files beside the archive.

`<run>+annotations/<incarnation>/step-<step>-<epoch>-<rank>-<call>.parquet` has a row for each sequence. A thread writes
the file, and training never waits for the thread: values that cannot be written are dropped, with a log line.
"""

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from queue import Full, Queue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollq.buffer.archive.archiver import MARKER, open_archive
from rollq.buffer.archive.schema import INCARNATION_KEY, RUN_KEY, VERSION, VERSION_KEY, parquet
from rollq.consumer.batches.batch import Batch

log = logging.getLogger(__name__)

MOST_WAITING = 4
"""How many calls' annotations may wait to be written; further annotations are dropped."""
ROWS_PER_READ = 64
"""How many sequences are read at a time: a whole file may not fit into memory."""


class _Annotation(NamedTuple):
    batch: Batch
    call: int
    values: Mapping[str, npt.NDArray[Any]]
    sequences: npt.NDArray[Any]


class Annotator:
    """Writes one trainer rank's annotations to the archive at `url`."""

    def __init__(self, url: str, run: str, incarnation: str, epoch: int, rank: int) -> None:
        """Raises `ConfigError` unless the URL names an existing folder or a bucket, and without pyarrow."""
        parquet()
        self._objects = open_archive(url)
        self._run, self._incarnation, self._epoch, self._rank = run, incarnation, epoch, rank
        self._folder = f"{run}+annotations/{incarnation}"
        self._is_marked = False
        self._calls = (0, 0)  # the last annotated step, and its number of calls
        self._waiting: Queue[_Annotation | None] = Queue(MOST_WAITING)
        # a daemon thread: a hanging archive does not keep the process alive
        self._thread = threading.Thread(target=self._write_all, name="annotations", daemon=True)
        self._thread.start()

    def annotate(self, batch: Batch, values: Mapping[str, npt.ArrayLike], sequences: npt.ArrayLike) -> bool:
        """Write `values` of loss tokens, [n] each; `sequences` [n] holds the index of each token's sequence. Returns
        False if the values are dropped, because the queue is full or they are not arrays.

        See `Consumer.annotate`.
        """
        step, calls = self._calls
        call = calls if step == batch.step else 0
        self._calls = (batch.step, call + 1)
        try:
            arrays = {name: _array(value) for name, value in values.items()}
            self._waiting.put_nowait(_Annotation(batch, call, arrays, _array(sequences)))
        except Full:
            log.warning("the archive is too slow: annotations of step %d are left out", batch.step)
            return False
        except Exception as error:  # noqa: BLE001 - nothing of this may stop training
            log.warning("annotations of step %d are left out: %s", batch.step, error)
            return False
        return True

    def close(self, wait_s: float = 10.0) -> None:
        """Wait until everything is written: at most `wait_s` for a place in the queue, and at most `wait_s` for the
        thread."""
        with suppress(Full):
            self._waiting.put(None, timeout=wait_s)
        self._thread.join(wait_s)
        if self._thread.is_alive():
            log.warning("the archive does not answer: the last annotations are left out")

    def _write_all(self) -> None:
        while (annotation := self._waiting.get()) is not None:
            try:
                self._write(annotation)
            except Exception as error:  # noqa: BLE001 - nothing of this may stop training
                log.warning("annotations of step %d are left out: %s", annotation.batch.step, error)

    def _write(self, one: "_Annotation") -> None:
        rows = rows_of(self._run, self._epoch, one.batch, one.values, one.sequences)
        name = f"step-{one.batch.step:08d}-{self._epoch}-{self._rank}-{one.call}.parquet"
        self._check_mounted()
        self._objects.put(f"{self._folder}/{name}", self._encode(rows, one.values))

    def _check_mounted(self) -> None:
        """Leave a marker once; a missing marker means that the folder is no longer mounted."""
        if self._is_marked:
            self._objects.check_mounted(f"{self._folder}/{MARKER}")
        else:
            self._objects.put(f"{self._folder}/{MARKER}", b"")
            self._is_marked = True

    def _encode(self, rows: list[dict[str, Any]], values: Mapping[str, npt.NDArray[Any]]) -> bytes:
        import pyarrow as pa

        number, text = pa.int64(), pa.string()
        columns = [
            ("run", text), ("task", text), ("group_id", number), ("sample", pa.int32()), ("segment", pa.int32()),
            ("step", number), ("trainer_epoch", number), ("advantage", pa.float32()),
            *((name, pa.list_(pa.from_numpy_dtype(value.dtype))) for name, value in values.items()),
        ]  # fmt: skip
        metadata = {VERSION_KEY: str(VERSION), RUN_KEY: self._run, INCARNATION_KEY: self._incarnation}
        sink = BytesIO()
        table = pa.Table.from_pylist(rows, schema=pa.schema(columns, metadata))
        parquet().write_table(table, sink, compression="zstd", row_group_size=ROWS_PER_READ)
        return sink.getvalue()


def _array(values: Any) -> npt.NDArray[Any]:
    """Values as an array. A tensor becomes float32 if numpy lacks its dtype, such as bfloat16."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
    return np.asarray(values)


def rows_of(
    run: str, epoch: int, batch: Batch, values: Mapping[str, npt.NDArray[Any]], sequences: npt.NDArray[Any]
) -> list[dict[str, Any]]:
    """Return a row for each sequence in `sequences`. Values have an item per response token, None where untrained.

    Raises `ValueError` if a sequence does not have one value per loss token.
    """
    first_sample = np.flatnonzero(np.diff(batch.sample_groups, prepend=-1))
    rows = []
    for index in np.unique(sequences).tolist():
        sequence = batch.sequences[index]
        chosen = np.flatnonzero(sequences == index)
        at = np.flatnonzero(sequence.loss_mask)
        if len(at) != len(chosen):
            raise ValueError(f"sequence {index} has {len(chosen)} values and {len(at)} loss tokens")
        first = int(np.searchsorted(batch.sequence_groups, batch.sequence_groups[index]))
        prompt = sequence.prompt_tokens
        row = {
            "run": run,
            "task": sequence.task,
            "group_id": sequence.group_id,
            "sample": sequence.sample - int(first_sample[batch.sample_groups[sequence.sample]]),
            "segment": sum(batch.sequences[other].sample == sequence.sample for other in range(first, index)),
            "step": batch.step,
            "trainer_epoch": epoch,
            "advantage": float(batch.advantages[sequence.sample]),
        }
        for name, value in values.items():
            items: list[Any] = [None] * (len(sequence.ids) - prompt)
            for place, item in zip((at - prompt).tolist(), value[chosen].tolist(), strict=True):
                items[place] = item
            row[name] = items
        rows.append(row)
    return rows
