"""A list of a live run that continues in the archive, while the archive hangs."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest

from rollq.buffer.archive.archiver import Archiver
from rollq.buffer.archive.run_archive import RunArchive
from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ArchiveError
from rollq.buffer.query.selection import Selection
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.tickets import open_queue
from rollq.buffer.values.rollouts import Status
from rollq.monitor.dashboard import archived_rollouts
from rollq.monitor.dashboard.archived_rollouts import ArchivedRollouts
from rollq.monitor.dashboard.live_rollouts import LiveRollouts
from support.buffer_run import World, let_go

T = TypeVar("T")


class Direct:
    """Reads a run by its buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def read(self) -> NoReturn:
        raise NotImplementedError

    def call(self, do: Callable[[MonitorBuffer], T]) -> T:
        return do(self.buffer)


def test_a_run_that_was_made_again_has_another_archive(
    buffer: Buffer, server_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archived_rollouts, "LISTED_S", -1.0)
    world = World(buffer).start(math={"archive": True})
    world.complete(2)
    world.train(1)
    buffer.checkpoint(world.held, 1)
    Archiver(buffer, str(tmp_path), wait_s=0).finish(threading.Event())
    source = Direct(buffer)
    rollouts = ArchivedRollouts(LiveRollouts(source), lambda: RunArchive(str(tmp_path), source.call).pages)
    wanted = Selection(["math"], list(Status))
    assert len(rollouts.page(wanted, after="", limit=10).groups) == 2
    let_go(world)
    buffer.delete_run(open_queue(server_url, buffer.run))
    with Buffer.connect(server_url, buffer.run) as again:
        World(again).start(math={"archive": True})
        source.buffer = again
        found = rollouts.page(wanted, after="", limit=10)
    assert (found.groups, found.note) == ((), "")


def test_groups_in_the_buffer_are_listed_while_the_archive_hangs(buffer: Buffer) -> None:
    World(buffer).start().admit(2)
    answers = threading.Event()

    def hang() -> None:
        answers.wait()

    rollouts = ArchivedRollouts(LiveRollouts(Direct(buffer)), hang, wait_s=0.05)
    try:
        for _ in range(2):
            page = rollouts.page(Selection(["math"], list(Status)), after="", limit=10)
            assert len(page.groups) == 2
            assert "the archive does not answer within 0.05 s" in page.note
        assert rollouts.page(Selection(["math"], [Status.PENDING]), after="", limit=10).note == ""
        with pytest.raises(ArchiveError, match=r"does not answer within 0.05 s"):
            rollouts.look("math", 999)
    finally:
        answers.set()
