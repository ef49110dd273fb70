"""What others read from the archive, and what comes back from it."""

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as parquet
import pytest

from rollq.buffer.archive.archiver import encode_file
from rollq.buffer.archive.reader import Archive
from rollq.buffer.archive.rows import group_of, rows_of
from rollq.buffer.archive.schema import COLUMNS, VERSION, VERSION_KEY, check_version, schema
from rollq.buffer.calls.archiving import Portion, StoredGroup
from rollq.buffer.errors import ArchiveError
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.store.library import library_source
from rollq.buffer.store.scores import NO_TOKENS
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import (
    WHOLE,
    ArrayRef,
    FinishReason,
    ImageRef,
    Prompt,
    Sample,
    SampleStatus,
    Segment,
    VersionSpan,
)
from rollq.buffer.wire.frame_encoding import encode_samples
from rollq.buffer.wire.prompts import encode_prompt

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "archive.md"
FIELDS = {
    "status": "leaving", "left": "trained", "letters": "cf", "trained_step": "7", "position": "3", "batch_groups": "4",
    "step_groups": "6", "trainer_epoch": "2",
    "floors": "1:2", "token_threshold": "4", "counted_in": "2", "oldest": "5", "arrival": "11", "tries": "1",
    "row": "9", "admitted_ms": "1", "put_ms": "2000", "claimed_ms": "3000", "committed_ms": "4000", "left_ms": "5000",
    "generate_ms": "600", "attempt": "2", "leased": "1400 5 gpu 1",
    "history": "1 1300 ran_out 3 1100 5 gpu-0", "shaped": '{"rewards": [1.5, 0.0], "advantages": null}',
}  # fmt: skip


def segment(tokens: int, **given: Any) -> Segment:
    return Segment(
        prompt_ids=np.arange(2, dtype=np.int32),
        response_ids=np.arange(tokens, dtype=np.int32) + 7,
        logprobs=np.linspace(-1.1, -0.1, tokens, dtype=np.float32),
        versions=(VersionSpan(1, 5, 1), VersionSpan(2, 6, tokens - 1)),
        **given,
    )


AGENT = Sample(
    segments=(
        segment(3, loss_mask=np.array([True, False, True])),
        segment(
            2,
            arrays={
                "experts": np.arange(8, dtype=np.uint8).reshape(2, 4),
                "beside": ArrayRef("file:///a", "ff", (2,), "float32"),
            },
        ),
    ),
    status=SampleStatus.COMPLETED,
    finish_reason=FinishReason.STOP,
    reward=0.1,
    reward_parts={"format": 0.3, "answer": 1e-17},
    text="«done» \x00",
    sampling={"temperature": 0.7},
    extra={"worker": "gpu-1"},
    session_id="s",
    tools=({"type": "function"},),
    tool_choice={"name": "add"},
)
FAILED = Sample(segments=(), status=SampleStatus.FAILED, failure=FailureKind.GRADER, error="the judge raised")
PROMPT = Prompt(
    ({"role": "user", "content": "1 + 1"},),
    answer={"value": 2},
    ids=(1, 2),
    metadata={"level": 3},
    images=(ImageRef("file:///picture", "0" * 64),),
)


def stored(group_id: int = 4, prompt: Prompt = PROMPT) -> StoredGroup:
    return StoredGroup("math", group_id, FIELDS, encode_prompt(prompt), {WHOLE: encode_samples([AGENT, FAILED])})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step.parquet"
    path.write_bytes(encode_file("sums", "incarnation", Portion("math", 1, 7, (4, 5)), [stored(4), stored(5)]))
    return path


def same(one: Sample, other: Sample) -> bool:
    return encode_samples([one]) == encode_samples([other])


def test_a_group_comes_back_as_it_was(file: Path) -> None:
    rows = parquet.read_table(file).to_pylist()
    found = group_of(rows[:2])
    assert found.group.prompt == PROMPT
    assert found.group.samples[0].tools == AGENT.tools
    assert same(found.group.samples[0], AGENT)
    assert same(found.group.samples[1], FAILED)
    assert (found.position, found.batch_groups) == (3, 4)
    assert (found.floors, found.token_threshold) == (Floors.decode("1:2"), 4)
    assert (found.group.oldest_version, found.group.arrival, found.group.tries) == (5, 11, 1)
    assert found.group.shaped is not None
    assert found.group.shaped.rewards == (1.5, 0.0)


def test_rows_that_are_missing_are_noticed(file: Path) -> None:
    with pytest.raises(ArchiveError, match="group math:4: rows of the archive are missing"):
        group_of(parquet.read_table(file).to_pylist()[1:2])


def test_a_group_without_samples_has_rows_that_say_so() -> None:
    fields = {"status": "leaving", "left": "cancelled", "letters": "pp", "arrival": "1", "tries": "0"}
    rows = rows_of("sums", StoredGroup("math", 1, fields, encode_prompt(Prompt("p")), {}), 3)
    assert [(row["status"], row["response_ids"], row["step"]) for row in rows] == [("pending", [], 3)] * 2


def test_a_damaged_frame_does_not_stop_the_archive() -> None:
    frames = {WHOLE: b"nonsense"}
    rows = rows_of("sums", StoredGroup("math", 1, FIELDS, b"\xff", frames), 3)
    assert [row["status"] for row in rows] == ["pending", "pending"]


def test_a_batch_without_samples_that_were_damaged_is_refused() -> None:
    rows = rows_of("sums", StoredGroup("math", 1, FIELDS, encode_prompt(PROMPT), {WHOLE: b"nonsense"}), 3)
    with pytest.raises(ArchiveError, match="group math:1: its samples could not be read when it was archived"):
        group_of(rows)


def test_the_same_groups_give_the_same_bytes(file: Path) -> None:
    again = encode_file("sums", "incarnation", Portion("math", 1, 7, (4, 5)), [stored(4), stored(5)])
    assert again == file.read_bytes()


def test_pandas_reads_the_archive(file: Path) -> None:
    import pandas

    frame = pandas.read_parquet(file)
    assert frame.reward.tolist()[0] == 0.1
    assert [list(ids) for ids in frame.response_ids[0]] == [[7, 8, 9], [7, 8]]
    assert frame.committed_at[0] == pandas.Timestamp(4000, unit="ms", tz="UTC")


def test_duckdb_reads_the_archive(file: Path) -> None:
    import duckdb

    found = duckdb.sql(
        f"select group_id, sample, len(flatten(response_ids)), versions[1][1].version from '{file}' "
        "where outcome = 'trained' and reward > 0 order by group_id"
    )
    assert found is not None
    assert found.fetchall() == [(4, 0, 5, 5), (5, 0, 5, 5)]


def test_datasets_reads_the_archive(file: Path, tmp_path: Path) -> None:
    from datasets import load_dataset

    rows = load_dataset("parquet", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    assert rows[0]["logprobs"][0][0] == pytest.approx(-1.1)
    assert orjson.loads(rows[0]["reward_parts"]) == {"format": 0.3, "answer": 1e-17}


def test_a_file_names_its_version(file: Path) -> None:
    check_version(parquet.read_schema(file).metadata, "step.parquet")
    with pytest.raises(
        ArchiveError,
        match=f"has version 99 of the archive, but this rollq reads {VERSION}: use the rollq version that wrote it",
    ):
        check_version({VERSION_KEY: b"99"}, "step.parquet")
    with pytest.raises(ArchiveError, match="is not a file of an archive"):
        check_version({}, "step.parquet")


def test_a_file_of_this_version_needs_all_columns(file: Path) -> None:
    table = parquet.read_table(file)
    parquet.write_table(table.drop_columns(["leases"]).replace_schema_metadata(table.schema.metadata), file)
    with pytest.raises(ArchiveError, match="it has no column 'leases'"):
        Archive(str(file.parent)).rows(file.name)


def test_the_leases_of_a_group_are_in_its_rows(file: Path) -> None:
    first = parquet.read_table(file).to_pylist()[0]["leases"]
    assert [(one["attempt"], one["worker"], one["version"], one["outcome"], one["parts"]) for one in first] == [
        (1, "gpu-0", 5, "ran_out", 3), (2, "gpu 1", 5, "put", 0)
    ]  # fmt: skip
    assert [one["ended_at"] - one["leased_at"] for one in first] == [timedelta(milliseconds=ms) for ms in (200, 600)]


def test_every_column_has_a_description() -> None:
    assert list(COLUMNS) == schema().names


def test_the_guide_has_every_outcome() -> None:
    table = GUIDE.read_text("utf-8").split("| outcome | group |")[1].split("\n\n")[0]
    described = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.rpartition(" | ")[0])}
    calls = re.findall(r"drop_group\(clock, \w+, (.*)\)", library_source())
    reasons = {reason for call in calls for reason in re.findall(r"'(\w+)'", call)} - {"reused"}
    assert reasons | {"failed", "filtered", "damaged"} == described


@pytest.mark.parametrize("fields", [{"oldest": str(NO_TOKENS)}, {"letters": "pp", "token_versions": "-,-"}])
def test_a_group_without_tokens_has_no_oldest_version(fields: dict[str, str]) -> None:
    rows = rows_of("sums", replace(stored(), fields=FIELDS | fields), 7)
    assert rows[0]["oldest_version"] is None
    read = [row | {"status": "failed"} for row in rows]
    assert group_of(read).group.oldest_version == NO_TOKENS, "as the trainer got it"
