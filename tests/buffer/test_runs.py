"""Runs and tasks: created once, compared later, and noticed when the store has lost them."""

import threading

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import (
    ConfigError,
    RunMismatch,
    ServerRefused,
    StoreLost,
)
from rollq.buffer.replies import Claimed
from rollq.buffer.rollouts import GroupResult, Prompt, Status
from rollq.buffer.settings import TaskRules
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.library import library_source
from rollq.buffer.store.server import EmbeddedServer
from support.buffer_run import World, make_sample
from support.power_cut import kill_synced


def test_a_store_that_lost_its_data_is_noticed_by_every_call(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        world = World(buffer)
        world.start().complete(2)
        world.admit(2)
        leases = world.lease(1)
        buffer.client.flushall()
        for attempt in (
            lambda: buffer.clock("math"),
            lambda: buffer.counts("math"),
            lambda: buffer.admit("math", [(Prompt("x"), 1)], epoch=1, cursor=0, target=9, step=1),
            lambda: buffer.recycle("math", epoch=1, target=9, limit=1),
            lambda: buffer.lease(["math"], 1, worker="w", version=0, epoch=1),
            lambda: buffer.renew(leases),
            lambda: buffer.hand_back(leases),
            lambda: buffer.put([GroupResult(leases[0], (make_sample(0),) * 2)]),
            lambda: buffer.reap("math"),
            lambda: buffer.expire("math"),
            lambda: buffer.claim(world.held, 1, {"math": 2}),
            lambda: buffer.commit(world.held, 1),
            lambda: buffer.publish(world.held, 1, uri="u", digest="d"),
            lambda: buffer.renew_trainer(world.held),
            lambda: buffer.report_worker("w", {}),
        ):
            with pytest.raises(StoreLost):
                attempt()
        assert buffer.client.dbsize() == 0, "nothing is created again"


def test_a_server_that_was_started_again_empty_is_store_lost(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        world = World(buffer)
        world.start()
        buffer.client.flushall()
        buffer.client.function_flush()
        for attempt in (
            lambda: buffer.counts("math"),
            lambda: buffer.lease(["math"], 1, worker="w", version=0, epoch=1),
            lambda: buffer.claim(world.held, 1, {"math": 2}),
        ):
            with pytest.raises(StoreLost):
                attempt()


def test_another_incarnation_of_the_run_is_not_mistaken_for_ours(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as ours, Buffer.connect(fresh_server.url, run_name) as theirs:
        World(ours).start()
        ours.client.flushall()
        World(theirs).start()
        with pytest.raises(StoreLost, match="another incarnation"):
            ours.counts("math")


def test_run_and_tasks_are_created_once_and_then_compared(world: World) -> None:
    buffer = world.buffer
    buffer.create_run(model="qwen", tokenizer="t1")
    buffer.create_run()
    with pytest.raises(RunMismatch, match="model fingerprint qwen, this role has llama"):
        buffer.create_run(model="llama")
    rules = TaskRules(batch_groups=4)
    buffer.register_task("math", rules)
    assert buffer.rules("math").stale_threshold == rules.stale_threshold
    with pytest.raises(RunMismatch, match="batch_groups = 4, this role has 8"):
        buffer.register_task("math", TaskRules(batch_groups=8))


def test_a_task_registered_late_joins_the_live_epoch(world: World) -> None:
    world.start()
    world.buffer.publish(world.held, 3, uri="u", digest="3")
    world.buffer.register_task("late", TaskRules(batch_groups=1, group_size=1))
    clock = world.buffer.clock("late")
    assert (clock.epoch, clock.version) == (1, 3)


@pytest.mark.parametrize("name", ["", "a:b", "{x}", "a b", "..\r\n", "x" * 65, "käse", "*"])
def test_names_that_could_break_keys_are_refused(any_server: EmbeddedServer, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        Buffer.connect(any_server.url, name)
    with Buffer.connect(any_server.url, "fine") as buffer, pytest.raises(ConfigError, match="task name"):
        buffer.clock(name)


def test_functions_of_another_build_are_not_run_silently(fresh_server: EmbeddedServer, run_name: str) -> None:
    client = Buffer.connect(fresh_server.url, run_name).client
    foreign = library_source() + "\n-- another build"
    client.function_load(foreign, replace=True)
    with pytest.raises(RunMismatch, match=f"another build of the functions.*-p {fresh_server.port} function delete"):
        Buffer.connect(fresh_server.url, run_name)
    client.close()


def test_a_full_server_lets_roles_in_as_long_as_it_has_the_functions(
    fresh_server: EmbeddedServer, run_name: str
) -> None:
    with Buffer.connect(fresh_server.url, run_name) as first:
        World(first).start()
        first.client.config_set("maxmemory", "1mb")
        with Buffer.connect(fresh_server.url, run_name) as late:
            assert late.tasks() == ["math"]
        first.client.function_flush()
        with pytest.raises(ServerRefused, match="memory is full"):
            Buffer.connect(fresh_server.url, run_name)


def test_all_work_survives_a_killed_server(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        world = World(buffer)
        world.start().complete(4)
        before = world.claim(1)
        kill_synced(fresh_server, buffer.client)
        fresh_server.start()
        assert world.claim(1) == before
        assert isinstance(world.train(1), Claimed)
        assert world.statuses() == {"completed": 2, "archived": 2}
        world.check()


def test_a_subscription_waits_for_a_server_that_is_away(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        buffer.create_run()
        kill_synced(fresh_server, buffer.client)
        back = threading.Timer(0.2, fresh_server.start)
        back.start()
        with buffer.events():
            assert buffer.tasks() == []
        back.join()


def test_keys_are_spelled_the_same_in_lua_and_python(world: World) -> None:
    world.start().complete(2)
    keys = task_keys(world.buffer.run, "math")
    client = world.buffer.client
    assert client.exists(keys.clock, keys.progress, keys.by_version, keys.group(1), keys.rollout(1)) == 5
    world.claim(1)
    assert client.exists(keys.manifest(1), world.buffer.keys.plan(1), keys.status(Status.CLAIMED)) == 3
