"""A server keeps the clocks that it has read: what it keeps is always what is stored."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import rollq.buffer
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.store import library
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import task_keys
from support.buffer_machine import run_machine
from support.buffer_run import World, set_clock
from support.checked_clocks import checked_clocks
from support.late_copies import RecordingBuffer, check_copies
from support.waiting import wait_until

LUA = Path(rollq.buffer.__file__).parent / "lua"
WRITERS = {"access", "discard_task", "register_task", "restore_groups", "restore_task"}
"""The files that write a clock: by write_clock, or before a role can read it."""
MOST_CLOCKS = 1000
"""The clocks that a server keeps."""


@pytest.fixture
def checked_server(fresh_server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    with checked_clocks():
        yield fresh_server


def ready(client: redis.Redis, world: World) -> int:
    """The groups that are ready at the clock's step, by what the server of `client` keeps of the clock."""
    found: Any = client.fcall_ro(
        library.function_name("counts"), 1, task_keys(world.buffer.run, "math").clock, world.buffer.incarnation
    )
    return int(found[1])


@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_any_sequence_of_moves_keeps_what_is_stored(checked_server: EmbeddedServer, examples: int) -> None:
    run_machine(checked_server.url, examples=examples)


@pytest.mark.long
def test_every_function_keeps_what_is_stored(checked_server: EmbeddedServer, tmp_path: Path) -> None:
    with RecordingBuffer.connect(checked_server.url, "run") as recorded:
        check_copies(recorded, tmp_path)


def test_the_check_finds_a_clock_that_was_written_without_a_revision(checked_server: EmbeddedServer) -> None:
    with Buffer.connect(checked_server.url, "run") as buffer:
        World(buffer).start()
        buffer.counts("math")
        buffer.client.hset(task_keys("run", "math").clock, "step", 7)
        with pytest.raises(redis.ResponseError, match=r"clock\.step is kept as 1, and stored as 7"):
            buffer.counts("math")


def test_clocks_are_written_in_one_place() -> None:
    write = re.compile(r"redis\.call\(\s*'(H(SET|DEL|INCR)\w*|DEL|UNLINK|RENAME|COPY)', clock[._]key")
    assert {path.stem for path in LUA.glob("*/*.lua") if write.search(path.read_text())} == WRITERS


def test_no_function_can_assign_to_a_clock(fresh_server: EmbeddedServer) -> None:
    begins = "  local ready, stragglers = count_ready(clock, step)\n  local manifest"
    source = library.library_source()
    assert source.count(begins) == 1
    with Buffer.connect(fresh_server.url, "run") as buffer:
        World(buffer).start()
        client: Any = buffer.client
        client.function_load(source.replace(begins, f"  clock.step = 7\n{begins}"), replace=True)
        with pytest.raises(redis.ResponseError, match=r"clock\.step was assigned to"):
            buffer.readiness("math", 1)
        assert buffer.counts("math").clock.step == 1


def test_a_replica_answers_by_the_clock_that_it_was_sent(fresh_server: EmbeddedServer, tmp_path: Path) -> None:
    with (
        EmbeddedServer(tmp_path / "replica") as replica,
        Buffer.connect(fresh_server.url, "run") as buffer,
        redis.Redis.from_url(replica.url) as client,
    ):
        world = World(buffer).start(math={"max_staleness": 0})
        world.complete(2)
        client.replicaof("127.0.0.1", str(fresh_server.port))
        wait_until(lambda: client.info("replication")["master_link_status"] == "up")
        assert ready(client, world) == 2
        buffer.publish(world.held, 1, uri="u", digest="1")
        wait_until(lambda: client.hget(task_keys("run", "math").clock, "step") == b"2")
        assert ready(client, world) == 0


def test_a_clock_that_another_server_wrote_is_read_anew(world: World) -> None:
    world.start()
    assert world.admit(1) == 1
    set_clock(world.buffer, "math", control="pause")
    assert world.admit(1) == 0
    world.buffer.set_control("math", Control.RUN)
    assert world.admit(1) == 1


def test_a_run_can_be_restored_twice_where_it_was(any_server: EmbeddedServer, world: World, tmp_path: Path) -> None:
    world.start()
    world.complete(2)
    world.buffer.save(tmp_path / "saved")
    for _ in range(2):
        world.buffer.client.flushall()
        with Buffer.connect(any_server.url, world.buffer.run) as restored:
            restored.restore(tmp_path / "saved")
            assert restored.counts("math").ready == 2


def test_a_server_keeps_a_thousand_clocks(fresh_server: EmbeddedServer) -> None:
    with Buffer.connect(fresh_server.url, "run") as buffer:
        world = World(buffer).start()
        client: Any = buffer.client
        clock = task_keys("run", "math").clock

        def reads_of(key: str) -> int:
            """How often the server reads a whole clock when a function asks for it."""
            before = client.info("commandstats").get("cmdstat_hgetall", {"calls": 0})["calls"]
            client.fcall_ro(library.function_name("readiness"), 1, key, world.buffer.incarnation, 1)
            return int(client.info("commandstats").get("cmdstat_hgetall", {"calls": 0})["calls"] - before)

        others = [clock.replace(":math}", f":task{number}}}") for number in range(MOST_CLOCKS)]
        for other in others:
            client.copy(clock, other)
        *first, last = others
        assert reads_of(clock) == 0, "the epoch was begun here"
        assert [reads_of(other) for other in first] == [1] * len(first)
        assert reads_of(clock) == 0
        assert reads_of(last) == 1
        assert reads_of(clock) == 1, "a thousand were forgotten to keep one more"
