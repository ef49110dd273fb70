"""An archive is looked at by the page, and an archived group is the one that the buffer had."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.archive import pages
from rollq.buffer.archive.archiver import Archiver
from rollq.buffer.archive.export import export, groups_in
from rollq.buffer.archive.pages import ArchivePages
from rollq.buffer.archive.reader import ARCHIVED_AS, Archive
from rollq.buffer.calls.orders import GroupOrder
from rollq.buffer.errors import QueryError
from rollq.buffer.query.language import parse_sample
from rollq.buffer.query.ranking import Sort
from rollq.buffer.query.selection import MOST_READ, Selection
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import Sample, SampleStatus
from rollq.monitor.groups.view import view_of
from support.buffer_run import World
from support.dashboard import fill, put, written
from support.s3_server import S3Server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "archive").mkdir()
    return tmp_path / "archive"


@pytest.fixture
def archived(world: World, folder: Path) -> Path:
    """Steps 1 to 4 of math and code, a group that failed, and one that was dropped by hand."""
    rules: dict[str, object] = {"archive": True, "batch_groups": 3, "max_staleness": 4, "max_uncheckpointed_steps": 9}
    world.start(math=rules, code=rules)
    for step in range(1, 5):
        fill(world, 3)
        fill(world, 3, "code")
        world.train(step, math=3, code=3)
    put(world, *[Sample((), SampleStatus.FAILED, failure=FailureKind.GRADER, error="no memory")] * 2)
    dropped = put(world, written("by hand"), written("by hand"))
    world.buffer.order_group("math", dropped, GroupOrder.DROP)
    world.buffer.checkpoint(world.held, 4)
    Archiver(world.buffer, str(folder), wait_s=0).finish(threading.Event())
    return folder


@pytest.fixture
def found(archived: Path) -> ArchivePages:
    return ArchivePages(Archive(str(archived)))


def every(found: ArchivePages, limit: int = 4, **given: Any) -> Iterator[tuple[str, int]]:
    """Every group of a selection, page by page."""
    after: str | None = ""
    while after is not None:
        selection = Selection(**{"tasks": found.tasks(), "statuses": ARCHIVED_AS, **given})
        page = found.page(selection, after=after, limit=limit)
        assert len(page.groups) <= limit
        yield from ((group.task, group.group_id) for group in page.groups)
        after = page.after


def test_all_groups_come_once_the_newest_steps_first(found: ArchivePages) -> None:
    groups = list(every(found))
    assert len(groups) == len(set(groups)) == 26
    assert {number for _, number in groups[-6:]} == {1, 2, 3}
    assert list(every(found, limit=100)) == groups


def test_groups_are_chosen_by_task_status_step_and_text(found: ArchivePages) -> None:
    assert sorted(every(found, tasks=["code"], step=2)) == [("code", 4), ("code", 5), ("code", 6)]
    assert list(every(found, statuses=[ARCHIVED_AS[1]])) == [("math", 13)]
    assert list(every(found, text="BY HAND")) == [("math", 14)]
    assert list(every(found, tasks=["math"], text="answer 7")) == [("math", 7)]
    assert list(every(found, tasks=["code"], prompt="code 4")) == [("code", 5)]
    assert list(every(found, step=9)) == []
    with pytest.raises(QueryError):
        list(found.page(Selection(["math"], ARCHIVED_AS), after="x"))


def test_groups_are_sorted_and_filtered_by_their_samples(world: World, folder: Path) -> None:
    world.start(math={"archive": True, "batch_groups": 3})
    put(world, written("right" * 9, reward=1.0), written("wrong", reward=0.0))
    put(world, written("wrong" * 20, reward=0.0), written("no", reward=0.25))
    put(world, written("right" * 50, reward=1.0), written("x", reward=1.0))
    live = {group.group_id: group.outcomes for group in world.buffer.glance("math", [1, 2, 3])}
    world.train(1, math=3)
    world.buffer.checkpoint(world.held, 1)
    Archiver(world.buffer, str(folder), wait_s=0).finish(threading.Event())
    found = ArchivePages(Archive(str(folder)))
    assert {group.group_id: group.outcomes for group in found.page(Selection(["math"], ARCHIVED_AS)).groups} == live
    longest, wrong = Sort("tokens", descending=True), parse_sample({"reward": {"$lt": 0.2}})
    assert list(every(found, sort=longest)) == [("math", 3), ("math", 2), ("math", 1)]
    assert list(every(found, sort=longest, sample=wrong, limit=1)) == [("math", 2), ("math", 1)]
    assert list(every(found, sample=wrong, text="x", sort=longest)) == []
    query = {"sample": {"reward": {"$lt": 0.2}, "tokens": {"$gt": 10}}}
    assert [rows[0]["group_id"] for rows in Archive(str(folder)).groups(query)] == [2]


def test_an_archived_group_is_shown_as_it_was_in_the_buffer(world: World, archived: Path) -> None:
    fill(world, 3)
    fill(world, 3, "code")
    world.train(5, math=3, code=3)
    (live,) = world.buffer.look("math", [15])
    world.buffer.checkpoint(world.held, 5)
    Archiver(world.buffer, str(archived), wait_s=0).finish(threading.Event())
    group = ArchivePages(Archive(str(archived))).look("math", 15)
    assert group is not None
    before, after = view_of(live), view_of(group)
    assert after.samples == before.samples
    assert (after.prompt, after.answer, after.reward, after.step) == (before.prompt, before.answer, before.reward, 5)
    assert [event.text for event in after.events][-3:] == [
        "claimed for step 5",
        "trained: step 5 was committed",
        "is in the archive",
    ]


def test_groups_that_left_untrained_say_how(found: ArchivePages) -> None:
    for number, left in ((13, "dropped: failed"), (14, "dropped: by_hand")):
        group = found.look("math", number)
        assert group is not None
        assert [event.text for event in view_of(group).events][-2:] == [left, "is in the archive"]
    assert found.look("math", 99) is None
    assert found.look("nobody", 1) is None


def test_a_page_is_of_few_files(found: ArchivePages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "FILES_PER_PAGE", 2)
    failed = Selection(found.tasks(), [ARCHIVED_AS[1]])
    page = found.page(failed)
    while not page.groups:
        assert page.after is not None
        page = found.page(failed, after=page.after)
    assert len(list(every(found))) == 26


def test_few_files_are_in_memory(found: ArchivePages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "FILES_KEPT", 2)
    assert len(list(every(found))) == 26
    assert len(found._files) == 2


def test_a_search_reads_a_bounded_number_of_groups(world: World, folder: Path) -> None:
    world.start(math={"archive": True, "batch_groups": 200, "max_staleness": 4})
    fill(world, 200)
    world.train(1, math=200)
    world.buffer.checkpoint(world.held, 1)
    Archiver(world.buffer, str(folder), wait_s=0).finish(threading.Event())
    found = ArchivePages(Archive(str(folder)))
    page = found.page(Selection(["math"], ARCHIVED_AS, text="nothing has this"))
    assert (page.read, page.groups) == (MOST_READ, ())
    assert page.after is not None
    assert list(every(found, text="answer 199")) == [("math", 199)]


def test_a_file_of_an_export_and_a_single_task_are_shown_too(world: World, archived: Path, tmp_path: Path) -> None:
    (task,) = archived.glob("*/*/code")
    assert ArchivePages(Archive(str(task))).tasks() == ["code"]
    fill(world, 2)
    (tmp_path / "out").mkdir()
    export(groups_in(world.buffer, {}), tmp_path / "out" / "all.parquet", "parquet")
    exported = ArchivePages(Archive(str(tmp_path / "out")))
    assert exported.tasks() == ["math"]
    assert sorted(every(exported)) == [("math", 15), ("math", 16)]
    group = exported.look("math", 16)
    assert group is not None
    assert view_of(group).samples[0].text == "answer 16"


def test_an_archive_in_a_bucket_is_shown_too(archived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server(tmp_path / "s3") as server:
        (server.bucket / "some").mkdir(exist_ok=True)
        archived.rename(server.bucket / "some" / "prefix")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        found = ArchivePages(Archive(server.url))
        assert len(list(every(found))) == 26
        group = found.look("math", 5)
        assert group is not None
        assert view_of(group).samples[0].text == "answer 5"
