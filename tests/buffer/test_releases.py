"""Several releases of rollq on one server: each has its functions there, and shares runs of its schema."""

import re
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError, RunMismatch, StoreLost
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.store import library
from rollq.buffer.store.connection import open_client
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import SCHEMA_VERSION
from rollq.buffer.store.library import connection_name, digest, is_digest, library_name, library_source
from support.buffer_run import World
from support.other_release import MARK, OtherRelease


def libraries(buffer: Buffer) -> set[str]:
    listed = str(buffer.client.function_list())
    return set(re.findall(r"b'(rollq_[0-9a-f]+)'", listed))


def test_the_digest_is_that_of_the_source_and_part_of_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    source = library_source()
    assert is_digest(digest())
    assert source.startswith(f"#!lua name={library_name()}\n")
    names = re.findall(r"function_name = '(\w+)'", source)
    assert len(names) > 50
    assert all(name.startswith(f"{library_name()}_") for name in names)
    before = digest()
    monkeypatch.setattr(library, "constants", lambda: "local ARRIVALS = 1\n")
    digest.cache_clear()
    try:
        assert digest() != before
    finally:
        monkeypatch.undo()
        digest.cache_clear()
    assert digest() == before


@pytest.mark.parametrize("text", ["", "5", "0123456789a", "0123456789abc", "0123456789aB", "0123456789ab\n", "g" * 12])
def test_what_is_no_digest(text: str) -> None:
    assert not is_digest(text)


def test_two_releases_work_side_by_side_and_in_one_run(fresh_server: EmbeddedServer, tmp_path: Path) -> None:
    other = OtherRelease(tmp_path / "other")
    with (
        Buffer.connect(fresh_server.url, "mine") as mine,
        other.role(fresh_server.url, "theirs") as theirs,
        Buffer.connect(fresh_server.url, "theirs") as joined,
    ):
        world = World(mine)
        world.start().complete(2)
        assert theirs("start", "admit", "lease", "put") == ["done"] * 4
        assert libraries(mine) == {library_name(), f"rollq_{other.digest}"}
        world.train(1)
        world.check()
        assert mine.client.hexists(joined.keys.info, MARK), "the other release ran its function"
        assert not mine.client.hexists(mine.keys.info, MARK)
        # we join their run
        joined.create_run()
        shared = World(joined)
        shared.admit(2)
        assert theirs("lease", "train") == ["done", "done"]
        shared.admit(2)
        shared.put(shared.lease(2))
        assert theirs("put") == ["done"]
        assert shared.statuses() == {"completed": 4, "archived": 2}
        shared.check()


def test_a_release_with_another_schema_joins_no_run(fresh_server: EmbeddedServer, tmp_path: Path) -> None:
    other = OtherRelease(tmp_path / "other", schema=99)
    words = f"schema {SCHEMA_VERSION}, this (role|rollq) has 99: use .* or give the run another name"
    with Buffer.connect(fresh_server.url, "mine") as mine, other.role(fresh_server.url, "mine") as theirs:
        World(mine).start().complete(2)
        answers = theirs("join", "admit")
        assert all(re.search(f"^RunMismatch: .*{words}", answer) for answer in answers), answers


def test_a_role_that_only_reads_checks_the_schema(world: World) -> None:
    world.start()
    world.buffer.client.hset(world.buffer.keys.info, "schema", 5)
    monitor = MonitorBuffer(world.buffer.servers, world.buffer.run)
    for call in (lambda: monitor.incarnation, monitor.tasks, lambda: monitor.counts("math")):
        with pytest.raises(RunMismatch, match=f"created with schema 5, this rollq has {SCHEMA_VERSION}: use the rollq"):
            call()
    world.buffer.client.hdel(world.buffer.keys.info, "incarnation", "schema")
    world.buffer.client.hset(world.buffer.keys.info, mapping={"restoring": "digest", "restored_as": "cafe"})
    with pytest.raises(StoreLost, match="is not in this store"):
        monitor.tasks()


def test_every_connection_of_a_buffer_has_the_name_of_its_release(fresh_server: EmbeddedServer) -> None:
    with Buffer.connect(fresh_server.url, "mine") as buffer, open_client(fresh_server.url) as stranger:
        World(buffer).start().complete(2)
        with buffer.events():
            buffer.tasks()
            names = [connection["name"] for connection in stranger.client_list()]
    assert sorted(names) == ["", *[connection_name(library_name())] * (len(names) - 1)]
    assert len(names) >= 3, "the subscription has a separate connection"


def test_the_name_of_connections_cannot_be_given_in_a_url(fresh_server: EmbeddedServer) -> None:
    with pytest.raises(ConfigError, match="client_name, which rollq sets: leave it out"):
        Buffer.connect(f"{fresh_server.url}?client_name=mine", "mine")
