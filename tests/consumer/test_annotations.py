"""Annotations reach the archive, and never stop training."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch

from rollq.buffer.archive.archiver import Archiver
from rollq.buffer.archive.reader import Archive
from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ArchiveError
from rollq.consumer.annotations import MOST_WAITING, Annotator
from rollq.consumer.batches.batch import Batch
from rollq.consumer.claims.connection import Connection
from rollq.consumer.consumer import Consumer
from rollq.consumer.settings import ConsumerSettings
from rollq.consumer.trainer.recorded_run import RecordedRun
from support.any_server import AnyServer
from support.buffer_run import World
from support.waiting import wait_until

Values = tuple[dict[str, Any], np.ndarray[Any, Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "archive").mkdir()
    return tmp_path / "archive"


@pytest.fixture
def consumer(any_server: AnyServer, run_name: str, folder: Path, model_folder: Path) -> Iterator[Consumer]:
    with Buffer.connect(any_server.url, run_name) as buffer:
        world = World(buffer).start(math={"archive": True, "batch_groups": 1})
        world.complete(1)
        settings = ConsumerSettings(transport="path", weights_dir=folder.parent / "weights", takeover=True)
        yield Consumer.connect(
            Connection(any_server.url, run_name, archive=str(folder)), weights=model_folder, settings=settings
        )


def values_of(batch: Batch) -> Values:
    """A value for each loss token: the index of the sequence, and the place of the token."""
    sequences = np.repeat(np.arange(len(batch.sequences)), [one.loss_mask.sum() for one in batch.sequences])
    places = np.concatenate([np.flatnonzero(one.loss_mask) for one in batch.sequences])
    return {"logprob": places.astype(np.float32), "clipped": places > 2}, sequences


def test_annotations_are_joined_by_group_and_sample(consumer: Consumer, folder: Path, run_name: str) -> None:
    with consumer:
        batch = next(consumer)
        consumer.annotate(batch, *values_of(batch))
        consumer.commit(batch)
        consumer.checkpoint(1)
    (file,) = (folder / f"{run_name}+annotations").rglob("*.parquet")
    rows = parquet.read_table(file).to_pylist()
    assert [(row["group_id"], row["sample"], row["segment"], row["step"]) for row in rows] == [
        (1, 0, 0, 1),
        (1, 1, 0, 1),
    ]
    assert rows[0]["logprob"] == [2.0, 3.0, 4.0], "the prompt has two tokens"
    assert rows[0]["clipped"] == [False, True, True]


def test_tensors_of_micro_batches_are_annotated_one_by_one(consumer: Consumer, folder: Path, run_name: str) -> None:
    with consumer:
        batch = next(consumer)
        values, sequences = values_of(batch)
        for index in (0, 1):
            logprob = torch.tensor(values["logprob"][sequences == index], dtype=torch.bfloat16, requires_grad=True)
            consumer.annotate(batch, {"logprob": logprob}, torch.tensor(sequences[sequences == index]))
        consumer.annotate(batch, {"logprob": [[1.0], [1.0, 2.0]]}, sequences)
        consumer.commit(batch)
        consumer.checkpoint(1)
    rows = [
        row
        for file in sorted((folder / f"{run_name}+annotations").rglob("*.parquet"))
        for row in parquet.read_table(file).to_pylist()
    ]
    assert [(row["sample"], row["logprob"]) for row in rows] == [(0, [2.0, 3.0, 4.0]), (1, [2.0, 3.0, 4.0])]


def test_the_archive_is_read_without_its_annotations(
    consumer: Consumer, folder: Path, any_server: AnyServer, run_name: str
) -> None:
    with consumer:
        batch = next(consumer)
        consumer.annotate(batch, *values_of(batch))
        consumer.commit(batch)
        consumer.checkpoint(1)
    with Buffer.connect(any_server.url, run_name) as buffer:
        Archiver(buffer, str(folder), wait_s=0).finish(threading.Event())
    assert [rows[0]["group_id"] for rows in Archive(str(folder)).groups({})] == [1]


def test_a_folder_of_annotations_is_not_an_archive(consumer: Consumer, folder: Path, run_name: str) -> None:
    with consumer:
        batch = next(consumer)
        consumer.annotate(batch, *values_of(batch))
        consumer.commit(batch)
        consumer.checkpoint(1)
    annotations = Archive(str(folder / f"{run_name}+annotations"))
    refusal = "is not a file of an archive: it has no column 'outcome'. It may be a file of annotations"
    with pytest.raises(ArchiveError, match=refusal):
        list(annotations.groups({}))
    with pytest.raises(ArchiveError, match=refusal):
        RecordedRun(annotations)


def test_what_goes_wrong_is_logged_and_training_goes_ahead(
    consumer: Consumer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), consumer:
        batch = next(consumer)
        values, sequences = values_of(batch)
        consumer.annotate(batch, {"logprob": values["logprob"][:-1]}, sequences[:-1])
        folder.rename(folder.with_name("gone"))
        folder.write_text("not a folder")
        consumer.annotate(batch, values, sequences)
        consumer.commit(batch)
    messages = [record.message for record in caplog.records if "annotations of step 1 are left out" in record.message]
    assert len(messages) == 2
    assert "sequence 1 has 2 values and 3 loss tokens" in messages[0]


def test_nothing_is_written_where_no_file_system_is_mounted_any_more(
    consumer: Consumer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with consumer:
        batch = next(consumer)
        consumer.annotate(batch, *values_of(batch))
        wait_until(lambda: any(folder.rglob("*.parquet")))
        folder.rename(folder.with_name("unmounted"))
        folder.mkdir()
        consumer.annotate(batch, *values_of(batch))
        consumer.commit(batch)
    assert "annotations of step 1 are left out: it has lost all files of this run" in caplog.text
    assert list(folder.rglob("*")) == []


def test_training_does_not_wait_for_an_archive_that_hangs(
    consumer: Consumer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(Annotator, "_encode", lambda *_: hangs.wait())
    annotator = Annotator(str(folder), "sums", "incarnation", 1, 0)
    with consumer:
        batch = next(consumer)
        taken = [annotator.annotate(batch, *values_of(batch)) for _ in range(MOST_WAITING + 2)]
        assert False in taken
        annotator.close(wait_s=0.01)
        consumer.commit(batch)
    hangs.set()


def test_without_an_archive_nothing_is_written(
    any_server: AnyServer, run_name: str, folder: Path, model_folder: Path
) -> None:
    with Buffer.connect(any_server.url, run_name) as buffer:
        World(buffer).start(math={"batch_groups": 1}).complete(1)
        settings = ConsumerSettings(transport="path", weights_dir=folder.parent / "weights", takeover=True)
        with Consumer.connect(any_server.url, run=run_name, weights=model_folder, settings=settings) as consumer:
            batch = next(consumer)
            consumer.annotate(batch, *values_of(batch))
    assert list(folder.rglob("*")) == []
