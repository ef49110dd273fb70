"""Batches of an archive are those that the trainer claimed, to the last byte."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from rollq.buffer.archive.archiver import Archiver
from rollq.buffer.archive.reader import Archive
from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ArchiveError, ConfigError, InvalidGroup
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import GroupResult, Sample, SampleStatus, Segment, VersionSpan
from rollq.buffer.wire.frame_encoding import encode_samples
from rollq.buffer.wire.prompts import encode_prompt
from rollq.consumer.batches.batch import Batch
from rollq.consumer.consumer import Consumer
from rollq.consumer.settings import ConsumerSettings, TrainerSettings
from rollq.consumer.trainer.from_archive import train_from_archive
from rollq.consumer.trainer.recorded_run import RecordedRun
from support.any_server import AnyServer
from support.buffer_run import World

pytestmark = pytest.mark.any_server

STEPS = 4
TASKS: Any = {
    "math": {
        "archive": True, "max_staleness": 3, "max_token_staleness": 1, "min_valid_samples": 1, "max_uses": 2,
        "group_size": 3,
    },
    "code": {"archive": True, "max_staleness": 3},
}  # fmt: skip


def made(rng: np.random.Generator, epoch: int, version: int, failed: bool) -> Sample:
    """A sample of two segments, whose tokens are of all versions so far."""
    if failed:
        return Sample((), SampleStatus.FAILED, failure=FailureKind.GRADER, error="the judge raised")
    segments = []
    for _ in range(2):
        counts = [(epoch, made_by, int(rng.integers(1, 4))) for made_by in range(max(0, version - 2), version + 1)]
        tokens = sum(count for _, _, count in counts)
        segments.append(
            Segment(
                prompt_ids=rng.integers(0, 9, 3, dtype=np.int32),
                response_ids=rng.integers(0, 9, tokens, dtype=np.int32),
                logprobs=-rng.random(tokens, dtype=np.float32),
                versions=tuple(VersionSpan(*count) for count in counts),
                loss_mask=rng.random(tokens) < 0.8 if rng.random() < 0.5 else None,
                arrays={"values": rng.random(tokens, dtype=np.float32)},
            )
        )
    return Sample(
        tuple(segments), SampleStatus.COMPLETED, reward=float(rng.random()), sampling={"temperature": 0.7},
        reward_parts={"exact": float(rng.random())}, extra={"worker": "w"}, text="an answer",
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "archive").mkdir()
    return tmp_path / "archive"


@pytest.fixture
def recorded(any_server: AnyServer, run_name: str, folder: Path, model_folder: Path) -> Iterator[list[Batch]]:
    """The batches of a run with two tasks, groups that are trained twice, and a trainer that comes back."""
    rng = np.random.default_rng(7)
    settings = ConsumerSettings(transport="path", weights_dir=folder.parent / "weights", takeover=True)
    with Buffer.connect(any_server.url, run_name) as buffer:
        world = World(buffer).start(**TASKS)
        batches: list[Batch] = []
        for first, last in ((1, 2), (3, STEPS)):
            consumer = Consumer.connect(
                any_server.url, run=run_name, weights=model_folder, resume_from=first - 1, settings=settings
            )
            with consumer:
                for step in range(first, last + 1):
                    for task in TASKS:
                        world.admit(2, task)
                        leases = world.lease(2, task)
                        results = [
                            GroupResult(
                                lease,
                                tuple(
                                    made(rng, consumer.epoch, step - 1, failed=task == "math" and index == 1)
                                    for index in range(len(lease.samples))
                                ),
                            )
                            for lease in leases
                        ]
                        buffer.put(results)
                    batch = next(consumer)
                    batch.content.make_sequences(range(len(batch.groups)))
                    list(batch.groups)
                    consumer.publish(model_folder, step=batch.step)
                    consumer.commit(batch)
                    batches.append(batch)
                consumer.checkpoint(last)
        Archiver(buffer, str(folder), wait_s=0).finish(threading.Event())
        yield batches


def content(batch: Batch) -> dict[str, object]:
    """All that a trainer may read of a batch, as plain values and bytes."""
    sequences = [
        {
            name: getattr(sequence, name).tobytes()
            for name in ("ids", "versions", "epochs", "staleness", "logprobs", "loss_mask")
        }
        | {"group": sequence.group_id, "task": sequence.task, "temperature": sequence.temperature}
        for sequence in batch.sequences
    ]
    return {
        "step": batch.step,
        "groups": batch.group_ids,
        "prompts": [encode_prompt(group.prompt) for group in batch.groups],
        "facts": [(group.oldest_version, group.arrival, group.tries, group.shaped) for group in batch.groups],
        "samples": [encode_samples(group.samples) for group in batch.groups],
        "rewards": batch.rewards.tobytes(),
        "valid": batch.valid.tobytes(),
        "advantages": batch.advantages.tobytes(),
        "lengths": batch.lengths.tobytes(),
        "counts": batch.counts,
        "sequences": sequences,
    }


def test_the_batches_of_an_archive_are_those_that_were_claimed(recorded: list[Batch], folder: Path) -> None:
    run = RecordedRun(Archive(str(folder)))
    for live in recorded:
        batch = next(run)
        found, wanted = content(batch), content(live)
        assert {name for name in wanted if found[name] != wanted[name]} == set()
        run.commit(batch)
    assert next(run, None) is None
    assert any(sequence.loss_mask.any() for batch in recorded for sequence in batch.sequences)


def test_training_resumes_where_it_stopped(recorded: list[Batch], folder: Path) -> None:
    assert next(RecordedRun(Archive(str(folder)), resume_from=2)).step == 3
    stop = threading.Event()
    stop.set()
    assert next(RecordedRun(Archive(str(folder)), stop=stop), None) is None


def test_a_step_that_was_removed_is_noticed(recorded: list[Batch], folder: Path) -> None:
    for file in folder.rglob("step-00000002-*"):
        file.unlink()
    run = RecordedRun(Archive(str(folder)))
    run.commit(next(run))
    with pytest.raises(ArchiveError, match="step 2 is not in the archive, but step 3 is"):
        next(run)


@pytest.mark.parametrize("task", TASKS)
def test_a_step_without_the_file_of_a_task_is_an_error(recorded: list[Batch], folder: Path, task: str) -> None:
    (file,) = folder.rglob(f"{task}/step-00000002-*")
    file.unlink()
    run = RecordedRun(Archive(str(folder)))
    run.commit(next(run))
    with pytest.raises(ArchiveError, match="step 2 trained 4 groups of all tasks, but only 2 are in the archive"):
        next(run)


def test_steps_that_a_trainer_went_back_before_are_not_continued(
    any_server: AnyServer, run_name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Buffer.connect(any_server.url, run_name) as buffer:
        world = World(buffer).start(math={"archive": True, "resume": "fresh"})
        for step in (1, 2, 3):
            world.complete(2)
            world.train(step)
        world.begin(1, launch_id="second")
        world.complete(2)
        world.train(2)
        Archiver(buffer, str(folder), wait_s=0).finish(threading.Event())
    run = RecordedRun(Archive(str(folder)))
    for groups in ([1, 2], [7, 8]):
        batch = next(run)
        assert [group_id for _, group_id in batch.group_ids] == groups
        run.commit(batch)
    remedy = r"step 3 does not continue step 2: .* Set steps = 2 in \[trainer\]"
    with pytest.raises(ArchiveError, match=remedy):
        next(run)
    with pytest.raises(ArchiveError, match=remedy):
        next(RecordedRun(Archive(str(folder)), resume_from=2))
    assert "begins with" not in caplog.text
    for file in folder.rglob("step-00000001-*"):
        file.unlink()
    RecordedRun(Archive(str(folder)))
    assert "starts with step 2: it is trained from the initial weights" in caplog.text


def test_a_bad_batch_has_no_replacement(recorded: list[Batch], folder: Path) -> None:
    run = RecordedRun(Archive(str(folder)))
    with pytest.raises(
        InvalidGroup, match="step 1: its batch cannot be trained, and a recorded run has no replacement"
    ):
        run.release(next(run), "quarantine")


def test_the_archives_of_two_runs_are_not_mixed(recorded: list[Batch], folder: Path, any_server: AnyServer) -> None:
    with Buffer.connect(any_server.url, "another") as buffer:
        world = World(buffer).start(math={"archive": True})
        world.complete(2)
        world.train(1)
        buffer.checkpoint(world.held, 1)
        Archiver(buffer, str(folder), wait_s=0).finish(threading.Event())
    with pytest.raises(ArchiveError, match="has the archives of several runs: name the folder of one: another/"):
        RecordedRun(Archive(str(folder)))


def test_the_reference_trainer_trains_on_an_archive(
    recorded: list[Batch], folder: Path, tmp_path: Path, model_folder: Path
) -> None:
    from rollq.consumer.trainer.from_archive import train_from_archive

    settings = TrainerSettings(
        model=model_folder, output=tmp_path / "out", steps=3, checkpoint_every=2, max_mismatch=None
    )
    assert train_from_archive(Archive(str(folder)), settings) == 3
    longer = settings.model_copy(update={"steps": 9})
    assert train_from_archive(Archive(str(folder)), longer) == STEPS
    lines = [orjson.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["reward"] == pytest.approx(recorded[0].rewards[recorded[0].valid].mean())


def test_a_correction_for_draws_is_refused_because_the_archive_has_no_probabilities(
    recorded: list[Batch], folder: Path, model_folder: Path, tmp_path: Path
) -> None:
    chosen = {"model": model_folder, "output": tmp_path / "out", "steps": 1, "advantages": {"draw_correction": 0.5}}
    with pytest.raises(ConfigError, match="draw_correction: the archive does not have the probabilities of draws"):
        train_from_archive(Archive(str(folder)), TrainerSettings.model_validate(chosen))
