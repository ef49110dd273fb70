"""Runs and tasks: created once, compared later, and noticed when the store has lost them."""

import threading
from collections.abc import Callable

import pytest
from redis.exceptions import ResponseError

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.errors import (
    ConfigError,
    RunMismatch,
    ServerRefused,
    StoreLost,
)
from rollq.buffer.rules.codec import encode_rules
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import SCHEMA_VERSION, task_keys
from rollq.buffer.values.rollouts import GroupResult, Prompt, Status
from support.any_server import AnyServer
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
        assert (buffer.client.dbsize(), buffer.client.function_list()) == (0, []), "nothing is created again"


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
    with pytest.raises(RunMismatch, match="task 'math': group_size = 4, and the run has 8: it cannot change"):
        buffer.register_task("math", TaskRules(batch_groups=4, group_size=4))


def test_a_task_registered_late_joins_the_live_epoch(world: World) -> None:
    world.start()
    world.buffer.publish(world.held, 3, uri="u", digest="3")
    world.buffer.register_task("late", TaskRules(batch_groups=1, group_size=1))
    clock = world.buffer.clock("late")
    assert (clock.epoch, clock.version) == (1, 3)


LATE = TaskRules(batch_groups=1, group_size=2)


def while_registering(
    world: World, monkeypatch: pytest.MonkeyPatch, *, before: str = "", after: str = "", then: Callable[[], object]
) -> None:
    """Register the task `late`; `then` happens before or after one of the calls for it."""
    own = Buffer(world.buffer.servers, world.buffer.run)
    call = own.call

    def watched(name: str, key: str, *args: object) -> object:
        if name == before:
            then()
        reply = call(name, key, *args)
        if name == after:
            then()
        return reply

    monkeypatch.setattr(own, "call", watched)
    own.register_task("late", LATE)


@pytest.mark.parametrize("before", ["register_task", "add_task"])
def test_a_role_that_dies_while_it_registers_a_task_stops_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    world.start().complete(2)
    with pytest.raises(KeyboardInterrupt):
        while_registering(world, monkeypatch, before=before, then=die)
    assert world.buffer.tasks() == ["math"]
    world.train(1)
    world.begin(1, launch_id="launch-2")
    world.buffer.register_task("late", LATE)
    assert world.buffer.clock("late").epoch == 2
    world.complete(1, "late")
    world.train(2, late=1)


@pytest.mark.parametrize("call", ["register_task", "add_task"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_task_that_is_registered_while_a_trainer_starts_is_of_its_epoch(
    world: World, monkeypatch: pytest.MonkeyPatch, moment: str, call: str
) -> None:
    world.start().complete(2)

    def begin() -> None:
        world.begin(0, launch_id="launch-2")

    while_registering(world, monkeypatch, **{moment: call, "then": begin})  # type: ignore[arg-type]
    assert world.buffer.clock("late").epoch == 2
    world.train(1)
    assert world.buffer.clock("late").version == 1


def test_a_trainer_brings_along_a_task_that_has_not_heard_of_its_epoch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start().complete(2)
    rules = [item for pair in encode_rules(LATE).items() for item in pair]
    epoch = (1, world.held.nonce, 0, 0)
    world.buffer.call_task("register_task", "late", world.buffer.keys.events, *epoch, "{}", "", "", *rules)
    world.begin(0, launch_id="launch-2")
    world.buffer.call("add_task", world.buffer.keys.info, world.buffer.incarnation, "late")
    world.train(1)
    clock = world.buffer.clock("late")
    assert (clock.epoch, clock.version, clock.committed) == (2, 1, 1)


@pytest.mark.parametrize("name", ["", "a:b", "{x}", "a b", "..\r\n", "x" * 65, "käse", "*"])
def test_names_that_could_break_keys_are_refused(any_server: AnyServer, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        Buffer.connect(any_server.url, name)
    with Buffer.connect(any_server.url, "fine") as buffer, pytest.raises(ConfigError, match="task name"):
        buffer.clock(name)


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


def test_a_role_that_is_refused_for_one_identity_leaves_none(world: World) -> None:
    create = world.buffer.create_run
    create(identities={"environment": "desk"})
    with pytest.raises(RunMismatch, match="created with environment desk, this role has shop"):
        create(identities={"chat template": "qwen", "environment": "shop"})
    create(identities={"chat template": "llama", "environment": ""})
    with pytest.raises(RunMismatch, match="created with environment desk, this role has shop"):
        create(identities={"environment": "shop"})


def test_an_identity_without_its_name_creates_no_run(world: World) -> None:
    info = world.buffer.keys.info
    with pytest.raises(ResponseError, match="an argument is missing"):
        world.buffer.call("create_run", info, "0" * 32, SCHEMA_VERSION, "", "", "", "environment")
    assert not world.buffer.client.exists(info)


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


def test_a_task_that_the_run_knows_is_not_created_again(world: World) -> None:
    """A primary of a cluster came back without its data, and the run's keys are on another one."""
    world.start()
    world.buffer.send("DEL", task_keys(world.buffer.run, "math").clock)
    with pytest.raises(StoreLost, match=r"task 'math' of run .* is not in this store"):
        world.buffer.register_task("math", TaskRules(batch_groups=2, group_size=2))
