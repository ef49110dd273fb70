"""A list of a live run that continues in the archive, while the archive hangs."""

import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ArchiveError
from rollq.buffer.query.selection import Selection
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.values.rollouts import Status
from rollq.monitor.dashboard.archived_rollouts import ArchivedRollouts
from rollq.monitor.dashboard.live_rollouts import LiveRollouts
from support.buffer_run import World

T = TypeVar("T")


class Direct:
    """Reads a run by its buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def read(self) -> NoReturn:
        raise NotImplementedError

    def call(self, do: Callable[[MonitorBuffer], T]) -> T:
        return do(self._buffer)


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
