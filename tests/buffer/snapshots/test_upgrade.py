"""Upgrading a run that an older rollq has stored, in place, on a real server.

`older/schema-6.json.gz` has the keys of a run that the release with schema 6 has made: ten groups of `math`, two of
them running, and two of `code`, at the second train step.
"""

import base64
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner
from rq import Queue

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError, RunMismatch
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import SCHEMA_VERSION, RunKeys
from rollq.buffer.tickets import open_queue
from rollq.cli.main import main
from support.buffer_run import World

OLDER = orjson.loads(gzip.decompress((Path(__file__).parent / "older" / "schema-6.json.gz").read_bytes()))
RUN = "old"


def load(client: Any) -> None:
    """Store the keys of the older run."""
    decode = base64.b64decode
    for key, (kind, content) in OLDER["keys"].items():
        match kind:
            case "hash":
                client.hset(key, mapping={decode(name): decode(value) for name, value in content.items()})
            case "string":
                client.set(key, decode(content))
            case "list":
                client.rpush(key, *map(decode, content))
            case "set":
                client.sadd(key, *map(decode, content))
            case "zset":
                client.zadd(key, {decode(member): score for member, score in content})
    client.hset(RunKeys(RUN).trainer, "deadline_ms", 1)  # it was saved long ago


@pytest.fixture
def older(fresh_server: EmbeddedServer) -> Iterator[Buffer]:
    with Buffer.connect(fresh_server.url, RUN) as buffer:
        load(buffer.client)
        yield buffer


@pytest.fixture
def queue(fresh_server: EmbeddedServer) -> Iterator[Queue]:
    queue = open_queue(fresh_server.url, RUN)
    yield queue
    queue.connection.close()


def check_upgraded(buffer: Buffer) -> None:
    """Everything is there, and the run goes on where it was."""
    assert buffer.send("HGET", buffer.keys.info, "schema").decode() == str(SCHEMA_VERSION)
    for task, before in OLDER["statuses"].items():
        after = {status.value: groups for status, groups in buffer.counts(task).statuses.items() if groups}
        assert after == {("pending" if status == "running" else status): groups for status, groups in before.items()}
        assert buffer.counts(task).unaccounted == 0
    world = World(buffer)
    world.begin(0, launch_id="after")
    assert len(world.claim(1, math=2, code=1).groups) == 3
    world.train(1, math=2, code=1)
    second = world.claim(2, math=2, code=1)
    assert [len(group.samples) for group in buffer.fetch(second.groups)] == [2, 2, 2]
    world.complete(1)
    buffer.change_rules("math", {"max_tries": 9})
    buffer.register_task("code", TaskRules(batch_groups=2, group_size=2))
    world.check()


def test_a_run_of_an_older_schema_is_upgraded_in_place(older: Buffer, queue: Queue, tmp_path: Path) -> None:
    with pytest.raises(RunMismatch, match=f"was created with schema 6, this rollq has {SCHEMA_VERSION}"):
        older.tasks()
    snapshot = older.upgrade_run(tmp_path / "backup", queue)
    assert snapshot is not None
    assert snapshot.groups == 12
    check_upgraded(older)
    assert older.upgrade_run(tmp_path / "other", queue) is None
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "dies_in", ["save", "delete_run", "_remove_keys", "restore", "_restore_task", "_finish_restore"]
)
@pytest.mark.parametrize("late", [False, True])
def test_an_upgrade_that_died_is_ended_by_another_one(
    older: Buffer, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str, late: bool
) -> None:
    alive = getattr(older, dies_in)

    def die(*args: Any, **kwargs: Any) -> None:
        if late:
            alive(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(older, dies_in, die)
        with pytest.raises(KeyboardInterrupt):
            older.upgrade_run(tmp_path / "backup", queue)
    again = Buffer(older.servers, RUN)
    again.upgrade_run(tmp_path / "backup", queue)
    check_upgraded(again)


def test_a_wrong_upgrade_changes_nothing(older: Buffer, queue: Queue, tmp_path: Path) -> None:
    with Buffer(older.servers, "another") as other:
        World(other).start().complete(1)
        other.save(tmp_path / "others")
        keys = sorted(older.client.keys("*"))
        with pytest.raises(ConfigError, match="has a snapshot of run 'another': name another folder"):
            older.upgrade_run(tmp_path / "others", queue)
        with pytest.raises(ConfigError, match="run 'nobody' is not on this server, or its upgrade did not end"):
            Buffer(older.servers, "nobody").upgrade_run(tmp_path / "backup", queue)
        older.client.hset(RunKeys(RUN).trainer, "deadline_ms", 10**15)
        with pytest.raises(ConfigError, match="run 'old' is in use: trainer 'trainer' holds it"):
            older.upgrade_run(tmp_path / "backup", queue)
        older.client.hset(RunKeys(RUN).info, "schema", 3)
        with pytest.raises(ConfigError, match="has schema 3, this rollq upgrades those with 4, 5, 6"):
            older.upgrade_run(tmp_path / "backup", queue)
        assert sorted(older.client.keys("*")) == keys


def test_the_command_upgrades_and_says_what_to_do_next(
    fresh_server: EmbeddedServer, older: Buffer, tmp_path: Path
) -> None:
    arguments = ["upgrade", "--url", fresh_server.url, "--run", RUN, "--backup", str(tmp_path / "backup")]
    first = CliRunner().invoke(main, arguments)
    assert first.exit_code == 0, first.output
    assert first.output.splitlines()[-2:] == [
        f"upgraded run 'old' with 12 groups; as it was, it is in {tmp_path / 'backup'}",
        "now start the trainer from its checkpoint of step 1 (or any from 0 on)",
    ]
    assert CliRunner().invoke(main, arguments).output == "run 'old' has the form of this rollq already\n"
