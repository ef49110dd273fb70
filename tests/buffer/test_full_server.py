"""A server whose memory is full refuses new groups, and everything else still works, so that it drains unaided."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.errors import ServerRefused
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import SamplePart, Status
from support.buffer_run import World, make_sample


@pytest.fixture
def world(fresh_server_of_each_kind: EmbeddedServer, run_name: str) -> Iterator[World]:
    with Buffer.connect(fresh_server_of_each_kind.url, run_name) as buffer:
        yield World(buffer)


def fill_up(world: World) -> None:
    world.buffer.client.config_set("maxmemory", "1mb")
    assert world.buffer.memory().share > 1


def test_a_full_server_admits_nothing_and_drains(world: World) -> None:
    world.start().complete(4)
    world.admit(2)
    leases = world.lease(2)
    fill_up(world)
    with pytest.raises(ServerRefused, match="memory is full"):
        world.admit(1)
    with pytest.raises(ServerRefused, match="memory is full"):
        world.buffer.salvage([SamplePart(leases[0], 0, 0, 0, make_sample(0, status="a"))])
    assert world.put(leases[:1]) == [PutOutcome.COMPLETED]
    world.buffer.hand_back(leases[1:])
    world.train(1)
    world.claim(2)
    world.buffer.release(world.held, 2, "return", claim_round=0)
    world.train(2)
    world.buffer.checkpoint(world.held, 2)
    assert world.statuses() == {"completed": 1, "pending": 1}
    world.check()


def test_a_trainer_starts_again_on_a_full_server(world: World) -> None:
    world.start().complete(4)
    world.train(1)
    world.train(2)
    fill_up(world)
    world.begin(1, mode="return", launch_id="launch-2")
    assert world.statuses() == {"archived": 2, "completed": 2}
    world.train(2)
    world.buffer.renew_trainer(world.held)
    world.buffer.sleep(world.held, "step 2")
    world.check()


def test_a_full_server_can_be_looked_at_and_saved(world: World, tmp_path: Path) -> None:
    world.start().complete(2)
    fill_up(world)
    assert [group.uid for group in world.buffer.query({"status": "completed"})] == [1, 2]
    assert world.buffer.counts("math").statuses[Status.COMPLETED] == 2
    assert world.buffer.inspect("math", 1) is not None
    assert world.buffer.save(tmp_path / "saved").groups == 2


def test_a_large_result_is_filed_on_a_full_server(world: World) -> None:
    """A full server sets no keys, and the frame passes through the function after all."""
    world.start().admit(4)
    before, after = world.lease(2), world.lease(2)
    texts = ["y" * 50_000, "z" * 50_000]
    assert world.put(before, text=texts[0]) == [PutOutcome.COMPLETED] * 2
    fill_up(world)
    assert world.put(after, text=texts[1]) == [PutOutcome.COMPLETED] * 2
    keys = task_keys(world.buffer.run, "math")
    assert [world.buffer.client.exists(keys.rollout(lease.group_id)) for lease in (*before, *after)] == [0, 0, 1, 1]
    found = world.buffer.fetch(world.claim(1, math=4).groups)
    assert [group.samples[0].text for group in found] == [texts[0], texts[0], texts[1], texts[1]]
    world.check()


@contextmanager
def before_exec(client: redis.Redis, act: Callable[[], object]) -> Iterator[None]:
    """Let `act` happen when the server has queued the commands of a transaction, and not run them yet."""
    connection: Any = client.connection_pool.get_connection()
    client.connection_pool.release(connection)
    send = connection.send_packed_command

    def send_in_two(pieces: Iterable[bytes], **options: Any) -> None:
        packed = b"".join(pieces)
        head, exec_command, _ = packed.partition(b"*1\r\n$4\r\nEXEC\r\n")
        send([head], **options)
        if exec_command:
            time.sleep(0.1)  # until the server has read them
            act()
            send([packed[len(head) :]], **options)

    connection.send_packed_command = send_in_two
    try:
        yield
    finally:
        connection.send_packed_command = send


def test_memory_that_runs_out_when_a_large_result_is_on_its_way_costs_nothing(world: World) -> None:
    world.start().admit(2)
    leases = world.lease(2)
    port = world.buffer.client.connection_pool.connection_kwargs["port"]
    with redis.Redis(port=port) as other:
        with before_exec(world.buffer.client, lambda: other.config_set("maxmemory", "1mb")):
            assert world.put(leases, text="y" * 50_000) == [PutOutcome.COMPLETED] * 2
        assert not list(other.scan_iter(match="*:payload:*"))
    found = world.buffer.fetch(world.claim(1).groups)
    assert [group.samples[0].text for group in found] == ["y" * 50_000] * 2
    world.check()


def test_groups_that_are_not_kept_for_another_use_are_counted(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 9}).complete(4)
    world.train(1)
    assert world.statuses() == {"archived": 2, "completed": 4}
    world.claim(2)
    world.buffer.commit(world.held, 2, keeps_copies=False)
    assert world.statuses() == {"archived": 4, "completed": 2}
    assert world.buffer.counts("math").progress["not_reused"] == 2
    world.check()
