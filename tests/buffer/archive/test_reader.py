"""Groups are exported from the buffer and from the archive with the same columns."""

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import orjson
import pyarrow.parquet as parquet
import pytest

from rollq.buffer.archive.archiver import Archiver
from rollq.buffer.archive.export import export, groups_in
from rollq.buffer.archive.reader import Archive
from rollq.buffer.errors import ArchiveError, ConfigError, QueryError
from support.buffer_run import World
from support.documented_commands import ROOT, code_with

pytestmark = pytest.mark.any_server

GUIDE = ROOT / "docs" / "guide" / "archive.md"
VOLATILE = {"outcome", "left_at", "epoch"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "archive").mkdir()
    return tmp_path / "archive"


def trained(world: World, folder: Path, steps: int = 2) -> World:
    world.start(math={"archive": True, "max_uncheckpointed_steps": 9})
    for step in range(1, steps + 1):
        world.complete(2)
        world.train(step)
    return world


def archive(world: World, folder: Path, step: int) -> None:
    world.buffer.checkpoint(world.held, step)
    Archiver(world.buffer, str(folder), wait_s=0).finish(threading.Event())


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_the_buffer_and_the_archive_export_the_same_rows(world: World, folder: Path, tmp_path: Path) -> None:
    trained(world, folder)
    query = {"status": "archived"}
    assert export(groups_in(world.buffer, query), tmp_path / "buffer.jsonl", "jsonl") == 4
    archive(world, folder, 2)
    assert export(Archive(str(folder)).groups(query), tmp_path / "archive.jsonl", "jsonl") == 4
    of_buffer, of_archive = lines(tmp_path / "buffer.jsonl"), lines(tmp_path / "archive.jsonl")
    assert len(of_buffer) == len(of_archive) == 8
    of_trained = {"position", "batch_groups", "step_groups", "trainer_epoch", "floors", "token_threshold", "claimed_at",
        "committed_at"}  # fmt: skip
    for one, other in zip(of_buffer, of_archive, strict=True):
        assert {name for name in one if one[name] != other[name]} <= VOLATILE | of_trained


def test_a_query_chooses_among_the_archived_groups(world: World, folder: Path, tmp_path: Path) -> None:
    archive(trained(world, folder), folder, 2)
    found = Archive(str(folder))
    assert [rows[0]["group_id"] for rows in found.groups({"uid": {"$gte": 3}, "task": "math"})] == [3, 4]
    assert [rows[0]["group_id"] for rows in found.groups({"status": "failed"})] == []
    with pytest.raises(QueryError):
        list(found.groups({"colour": 1}))


def test_the_code_of_the_page_reads_the_folder_of_a_run(world: World, folder: Path) -> None:
    archive(trained(world, folder), folder, 2)
    shown = {language: code_with(GUIDE, words).replace("/mnt/shared/archive/sums", str(folder / world.buffer.run))
             for language, words in (("python", "read_parquet"), ("sql", "group by step"))}  # fmt: skip
    names: dict[str, Any] = {}
    exec(compile(shown["python"], "a page", "exec"), names)  # noqa: S102 - it is ours
    of_pandas = list(names["trained"].items())
    assert [step for step, _ in of_pandas] == [1, 2]
    found = duckdb.sql(shown["sql"])
    assert found is not None
    assert sorted(found.fetchall()) == of_pandas


def test_parquet_is_an_archive_too(world: World, folder: Path, tmp_path: Path) -> None:
    trained(world, folder)
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "all.parquet"
    assert export(groups_in(world.buffer, {}), path, "parquet") == 4
    assert parquet.read_table(path).num_rows == 8
    assert len(list(Archive(str(path.parent)).groups({}))) == 4


def test_an_existing_file_stays(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        export([], tmp_path / "there", "jsonl")
    assert (tmp_path / "there").read_text() == "mine"


def test_a_folder_without_an_archive_is_refused(folder: Path) -> None:
    with pytest.raises(ArchiveError, match="has no file of an archive"):
        Archive(str(folder))


@pytest.mark.parametrize("content", [b"", b"not Parquet at all", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_that_is_not_parquet_is_named(world: World, folder: Path, content: bytes) -> None:
    archive(trained(world, folder), folder, 2)
    damaged = max(folder.rglob("*.parquet"))
    damaged.write_bytes(content)
    with pytest.raises(ArchiveError, match=rf"{damaged} is damaged, or is not a Parquet file: .*restore it"):
        list(Archive(str(folder)).groups({}))
    with pytest.raises(ArchiveError, match=f"{damaged} is damaged"):
        Archive(str(damaged.parent)).run()


def test_a_file_with_a_damaged_page_is_named(world: World, folder: Path) -> None:
    archive(trained(world, folder), folder, 2)
    damaged = max(folder.rglob("*.parquet"))
    content = bytearray(damaged.read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
    damaged.write_bytes(content)
    with pytest.raises(ArchiveError, match=f"{damaged} is damaged"):
        list(Archive(str(folder)).groups({}))


def test_the_staleness_of_a_group_counts_versions_as_its_claim_did(world: World, folder: Path) -> None:
    trained(world, folder)
    world.complete(2)
    world.buffer.checkpoint(world.held, 1)
    world.begin(1, launch_id="second", mode="regenerate")
    world.train(2)  # of groups with tokens of version 2, which counts as version 1 now
    archive(world, folder, 2)
    found = Archive(str(folder)).groups({"step": 2, "staleness": 0})
    assert [rows[0]["group_id"] for rows in found] == [5, 6]


def test_the_run_of_many_files_is_found_by_reading_one(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive(trained(world, folder, 4), folder, 4)
    found = Archive(str(folder))
    open_file, read = found._objects.open, Counter[str]()

    def counted(name: str) -> BinaryIO:
        read[name] += 1
        return open_file(name)

    monkeypatch.setattr(found._objects, "open", counted)
    assert found.run() == (world.buffer.run, world.buffer.incarnation)
    assert (len(found.names), read.total()) == (4, 1)


def test_reading_removes_nothing(world: World, folder: Path) -> None:
    archive(trained(world, folder), folder, 2)
    hidden = folder / ".env"
    hidden.write_text("mine")
    os.utime(hidden, (0, 0))
    assert len(list(Archive(str(folder)).groups({}))) == 4
    assert hidden.read_text() == "mine"


def test_a_batch_that_is_not_whole_is_refused(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(world, folder, 1)
    world.buffer.checkpoint(world.held, 1)
    monkeypatch.setattr("rollq.buffer.archive.archiver.PORTION_BYTES", 1)
    Archiver(world.buffer, str(folder), wait_s=0).archive_once(threading.Event())
    found = Archive(str(folder))
    ((step, names),) = found.steps().items()
    with pytest.raises(ArchiveError, match="step 1 trained 2 groups of task 'math', but only 1 are in the archive"):
        found.batch(step, names)
