"""Finding the runs of a server, and deleting one, on a real server."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rq import Queue

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.runs import GONE, find_runs, summarize
from rollq.buffer.errors import ConfigError, RunMismatch, StoreLost
from rollq.buffer.rules.codec import encode_rules
from rollq.buffer.rules.settings import PayloadSettings, TaskRules
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.tickets import enqueue_tickets, open_queue
from support.any_server import AnyServer
from support.buffer_run import World, let_go, payloads_in


@pytest.fixture
def queue(fresh_server: EmbeddedServer, run_name: str) -> Iterator[Queue]:
    queue = open_queue(fresh_server.url, run_name)
    yield queue
    queue.connection.close()


@pytest.fixture
def world(fresh_server: EmbeddedServer, run_name: str, tmp_path: Path) -> Iterator[World]:
    with Buffer.connect(fresh_server.url, run_name, payloads=payloads_in(tmp_path / "payloads")) as buffer:
        world = World(buffer)
        world.start(math={}, code={})
        world.complete(8)
        world.complete(2, "code")
        yield world


def test_all_that_a_run_has_is_deleted_and_nothing_of_others(
    world: World, queue: Queue, fresh_server: EmbeddedServer, run_name: str, tmp_path: Path
) -> None:
    other_name = f"{run_name}2"
    with Buffer.connect(fresh_server.url, other_name, payloads=payloads_in(tmp_path / "payloads")) as buffer:
        other = World(buffer)
        other.start().complete(8)
        others = sorted(buffer.client.keys(f"*{other_name}*"))
        files = sorted((tmp_path / "payloads" / other_name).rglob("*"))
        enqueue_tickets(queue, run_name, 5, 4)
        taken: Any = queue.connection.lmove(queue.key, queue.intermediate_queue_key)  # by a worker that died there
        assert queue.intermediate_queue.set_first_seen(taken.decode())
        let_go(world)
        assert [path for path in (tmp_path / "payloads" / run_name).rglob("*") if path.is_file()]

        world.buffer.delete_run(queue)

        left = set(buffer.client.keys("*")) - set(others)
        assert left == set(), left
        assert sorted(buffer.client.keys(f"*{other_name}*")) == others
        assert sorted((tmp_path / "payloads" / other_name).rglob("*")) == files
        assert not (tmp_path / "payloads" / run_name).exists()
        other.train(1)
    with pytest.raises(StoreLost):
        world.buffer.counts("math")
    with pytest.raises(StoreLost):  # a copy of the call that arrives late
        world.buffer.call("begin_delete", world.buffer.keys.info, world.buffer.incarnation)
    with pytest.raises(ConfigError, match="is not on this server"):
        world.buffer.delete_run(queue)


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("trainer", "trainer 'trainer' holds it for another"),
        ("worker", "1 worker has reported within 30 s"),
        ("producer", "a producer has checked it within 30 s"),
    ],
)
def test_a_run_that_a_role_uses_is_refused(world: World, queue: Queue, role: str, said: str) -> None:
    let_go(world)
    match role:
        case "trainer":
            world.buffer.renew_trainer(world.held)
        case "worker":
            world.buffer.report_worker("w", {})
        case "producer":
            world.buffer.reap("code")
    before = world.buffer.client.dbsize()
    with pytest.raises(ConfigError, match=f"is in use: {said}"):
        world.buffer.delete_run(queue)
    assert world.buffer.client.dbsize() == before


def register_late(world: World, task: str) -> None:
    """What a role does that slept between two calls of its start, or what the network delivers late."""
    rules = [item for pair in encode_rules(TaskRules(batch_groups=2, group_size=2)).items() for item in pair]
    world.buffer.call_task("register_task", task, world.buffer.keys.events, 0, "", -1, 0, "{}", "", "", *rules)


@pytest.mark.parametrize("follows", ["created", "restored"])
def test_a_task_that_is_registered_after_its_run_was_deleted_keeps_no_other_run_out(
    world: World, queue: Queue, tmp_path: Path, follows: str
) -> None:
    world.buffer.save(tmp_path / "saved")
    let_go(world)
    world.buffer.delete_run(queue)
    register_late(world, "math")
    with Buffer(world.buffer.servers, world.buffer.run, Patience(), payloads_in(tmp_path / "payloads")) as buffer:
        other = World(buffer)
        if follows == "restored":
            buffer.restore(tmp_path / "saved")
            other.begin(0, launch_id="another")
        else:
            other.start()
        with pytest.raises(StoreLost):
            register_late(world, "math")
        other.complete(2)
        other.train(1)


def test_a_task_with_groups_of_another_run_is_not_replaced(world: World, tmp_path: Path) -> None:
    """Such as one on a server of a cluster, when the one that knew the run came back empty."""
    world.buffer.client.delete(world.buffer.keys.info)
    with Buffer(world.buffer.servers, world.buffer.run, Patience(), payloads_in(tmp_path / "payloads")) as buffer:
        buffer.create_run()
        with pytest.raises(StoreLost):
            buffer.register_task("math", TaskRules(batch_groups=2, group_size=2))


@pytest.mark.parametrize("dies_at", ["_remove_keys", "remove_run", "send"])
def test_a_deletion_that_died_keeps_roles_out_and_is_ended_by_another_one(
    world: World, queue: Queue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dies_at: str
) -> None:
    let_go(world)
    buffer = world.buffer
    with monkeypatch.context() as dying:
        target: Any = buffer.payloads.outside if dies_at == "remove_run" else buffer
        alive = getattr(target, dies_at)

        def die(*args: Any) -> Any:
            if dies_at == "send" and args[0] != "UNLINK":
                return alive(*args)
            if dies_at == "remove_run":
                alive(*args)
            raise KeyboardInterrupt

        dying.setattr(target, dies_at, die)
        with pytest.raises(KeyboardInterrupt):
            buffer.delete_run(queue)
    role = Buffer(buffer.servers, buffer.run, Patience(), payloads_in(tmp_path / "payloads"))
    with pytest.raises(RunMismatch, match=r"is being deleted: wait .* repeat `rollq runs delete`"):
        role.create_run()
    assert summarize(role).state == "its deletion did not finish"
    role.delete_run(queue)
    assert role.client.keys("*") == []
    role.create_run()


def test_a_run_with_payloads_elsewhere_is_not_deleted_without_them(world: World, queue: Queue) -> None:
    let_go(world)
    with pytest.raises(ConfigError, match=r"set payloads.url as for its other roles"):
        Buffer(world.buffer.servers, world.buffer.run, Patience(), PayloadSettings()).delete_run(queue)
    assert world.buffer.tasks() == ["code", "math"]


def test_a_run_whose_restore_died_is_deleted(
    world: World, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.buffer.save(tmp_path / "saved")
    with Buffer(world.buffer.servers, "half", Patience(), payloads_in(tmp_path / "payloads")) as half:

        def die(*args: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(half, "_finish_restore", die)
        with pytest.raises(KeyboardInterrupt):
            half.restore(tmp_path / "saved")
        assert summarize(half).state == "its restore did not finish"
        half.delete_run(queue)
        assert half.client.keys("*half*") == []


def test_the_runs_of_a_server_are_found_with_their_size_and_their_roles(any_server: AnyServer, run_name: str) -> None:
    names = [f"{run_name}{suffix}" for suffix in ("", "-b", ".c")]
    for name in names:
        with Buffer.connect(any_server.url, name) as buffer:
            world = World(buffer)
            world.start(**{"math.1of2": {}, "math.2of2": {}}).complete(3, "math.1of2")  # type: ignore[arg-type]
            if name != names[1]:
                let_go(world)
            servers = buffer.servers
            found = {run.run: run for run in find_runs(servers, Patience())}
    mine = [found[name] for name in names]
    assert [(run.tasks, run.groups, run.state) for run in mine] == [(("math",), 3, "")] * 3
    assert all(run.size_bytes > 0 and run.keys > 5 and run.age_s is not None and run.age_s < 3600 for run in mine)
    assert [bool(run.roles) for run in mine] == [False, True, False]


def test_keys_without_their_run_are_found_and_named(world: World) -> None:
    world.buffer.client.delete(world.buffer.keys.info)
    (found,) = find_runs(world.buffer.servers, Patience())
    assert (found.run, found.state, replace(found, state="").groups) == (world.buffer.run, GONE, 10)
