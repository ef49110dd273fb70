"""docs/concepts/states.svg and the reference of moves: they show the moves that groups make."""

import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.redis_functions import Call
from rollq.buffer.values.rollouts import Status
from rollq_docs.moves import GONE, NEW, Move, moves
from rollq_docs.states import LINES, PICTURE, picture
from support.buffer_run import World, payloads_in
from support.golden_run import golden_run

DRAWN = re.compile(r'data-from="(\w+)" data-to="(\w+)"')

COPIED = {
    (NEW, "cooling"): {("archived", "cooling")},
    (NEW, "completed"): {("archived", "cooling"), ("cooling", "completed")},
}
"""What one call of `commit` does to the copy of a group that it has trained -> the moves that it makes of that."""


class WatchedBuffer(Buffer):
    """Sees which moves each call makes, in `seen`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: set[Move] = set()

    def call(self, name: str, key: str, *args: Any) -> Any:
        before = self._statuses()
        try:
            return super().call(name, key, *args)
        finally:
            self._compare(before)

    def call_each(self, calls: Callable[[], Iterable[Call]]) -> list[Any]:
        before = self._statuses()
        try:
            return super().call_each(calls)
        finally:
            self._compare(before)

    def _statuses(self) -> dict[tuple[str, Any], str]:
        found: dict[tuple[str, Any], str] = {}
        for task in ("math", "code", "held_out"):
            for status in Status:
                for group in self.client.zrange(task_keys(self.run, task).status(status), 0, -1):
                    found[task, group] = status.value
        return found

    def _compare(self, before: dict[tuple[str, Any], str]) -> None:
        after = self._statuses()
        for group in before.keys() | after.keys():
            move = before.get(group, NEW), after.get(group, GONE)
            if move[0] != move[1]:
                self.seen |= COPIED.get(move, {move})


def test_the_picture_shows_exactly_the_moves_of_the_functions() -> None:
    assert PICTURE.read_text("utf-8") == picture()
    assert set(DRAWN.findall(picture())) == set(moves())
    assert set(LINES) <= set(moves())


def test_groups_of_a_run_make_no_other_moves(server: EmbeddedServer, run_name: str, tmp_path: Path) -> None:
    with WatchedBuffer.connect(server.url, run_name, payloads=payloads_in(tmp_path / "payloads")) as watched:
        world = World(watched)
        for _ in golden_run(world, tmp_path):
            for task in watched.tasks():
                watched.expire(task)
    assert watched.seen <= set(moves())
    assert set(pairwise((NEW, "pending", "running", "completed", "claimed", "archived", GONE))) <= watched.seen
