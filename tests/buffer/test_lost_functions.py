"""A server that loses rollq's functions while roles run: they are loaded again, and no call is lost."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.errors import ServerRefused, StoreLost
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store import redis_functions
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.library import function_name, library_name
from rollq.buffer.store.pipelining import Command
from rollq.buffer.store.redis_functions import Call
from rollq.buffer.values.rollouts import GroupResult, Lease
from rollq.buffer.wire.group_fields import MOST_INLINE_BYTES
from support.any_server import AnyServer
from support.buffer_run import World, make_sample, payloads_in
from support.function_names import FUNCTION_NAMES
from support.golden_run import golden_run
from support.late_copies import name_of

LARGE = "y" * (MOST_INLINE_BYTES + 1)


class ForgetfulBuffer(Buffer):
    """A buffer whose server loses all functions before every call."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.called: set[str] = set()

    def call(self, name: str, key: str, *args: Any) -> Any:
        self._forget([name])
        return super().call(name, key, *args)

    def call_each(self, calls: Callable[[], Iterable[Call]]) -> list[Any]:
        self._forget(map(name_of, calls()))
        return super().call_each(calls)

    def _forget(self, names: Iterable[str]) -> None:
        self.called |= set(names)
        for client in self.servers.primaries():
            client.function_flush()


@pytest.fixture
def world(fresh_server: EmbeddedServer) -> Iterator[World]:
    with Buffer.connect(fresh_server.url, "run") as buffer:
        yield World(buffer)


def payloads(world: World) -> set[str]:
    return {key.decode() for key in world.buffer.client.scan_iter(match="*:payload:*", count=1000)}


def large(lease: Lease) -> GroupResult:
    return GroupResult(lease, (make_sample(0, text=LARGE),) * 2)


def test_every_call_of_a_run_loads_what_is_missing(any_server: AnyServer, tmp_path: Path) -> None:
    payloads = payloads_in(tmp_path / "payloads")
    with ForgetfulBuffer.connect(any_server.url, "run", payloads=payloads) as buffer:
        world = World(buffer)
        for _ in golden_run(world, tmp_path):
            world.check()
        with ForgetfulBuffer.connect(any_server.url, "restored", payloads=payloads) as restored:
            restored.restore(tmp_path / "saved")
            restored.reap("math")
            called = buffer.called | restored.called
    assert len(called) > 0.8 * len(FUNCTION_NAMES)


def test_payloads_beside_a_call_are_neither_lost_nor_left(world: World) -> None:
    world.start().admit(3)
    leases = world.lease(3)
    world.run_out(leases[2:])
    world.buffer.reap("math")
    world.buffer.client.function_flush()
    outcomes = world.buffer.put([large(lease) for lease in leases])
    assert outcomes == [PutOutcome.COMPLETED, PutOutcome.COMPLETED, PutOutcome.REFUSED]
    keys = task_keys(world.buffer.run, "math")
    assert payloads(world) == {keys.payload(lease.group_id, lease.nonce) for lease in leases[:2]}
    assert [group.samples[0].text for group in world.buffer.fetch(world.claim(1).groups)] == [LARGE, LARGE]
    world.check()


def test_a_payload_whose_call_missed_its_function_expires_if_its_worker_dies(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No group names it, and a payload in the task's slot is looked for by nothing else."""
    world.start().admit(2)
    first, second = world.lease(2)
    assert world.buffer.put([large(first)]) == [PutOutcome.COMPLETED]
    client = world.buffer.client
    client.function_flush()

    def die(key: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(world.buffer, "_load_functions", die)
        with pytest.raises(KeyboardInterrupt):
            world.buffer.put([large(first), large(second)])  # the first one again, as after a lost reply
    keys = task_keys(world.buffer.run, "math")
    lasting, staged = (keys.payload(lease.group_id, lease.nonce) for lease in (first, second))
    assert client.ttl(lasting) == -1
    assert 0 < client.ttl(staged) <= redis_functions.STAGED_S
    assert world.buffer.put([large(second)]) == [PutOutcome.COMPLETED]
    assert client.ttl(staged) == -1
    world.check()


def test_only_calls_that_missed_their_function_are_repeated(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start().admit(3)
    keys, leases, sent = task_keys(world.buffer.run, "math"), world.lease(3), list[Any]()
    fcall = redis_functions._fcall

    def miss(call: Command, *more_keys: str) -> Command:
        """The server has lost the functions for a moment, in the middle of the first trip."""
        command = fcall(call, *more_keys)
        sent.append(call[-2])
        return ("FCALL", "none", *command[2:]) if len(sent) == 2 else command

    fences = [(lease.group_id, lease.attempt, lease.nonce) for lease in leases]
    calls = [("renew", keys.clock, world.buffer.incarnation, *fence) for fence in fences]
    with monkeypatch.context() as patch:
        patch.setattr(redis_functions, "_fcall", miss)
        assert world.buffer.call_all(calls) == [[[], []], [[], []], [[], []]]
    assert sent == [1, 1, 1, 1]


def test_a_server_that_lost_the_run_too_gets_no_functions(world: World) -> None:
    world.start().admit(2)
    leases = world.lease(2)
    world.buffer.client.flushall()
    world.buffer.client.function_flush()
    for attempt in (
        lambda: world.buffer.register_task("late", TaskRules(batch_groups=1, group_size=1)),
        lambda: world.buffer.counts("math"),
        lambda: world.buffer.renew(leases),
    ):
        with pytest.raises(StoreLost, match="run 'run'"):
            attempt()
    assert world.buffer.client.function_list() == []
    assert not world.buffer.client.exists(world.buffer.keys.info, task_keys("run", "late").clock)


def test_a_restore_notices_that_its_server_was_emptied(
    world: World, fresh_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start().complete(2)
    world.buffer.save(tmp_path / "saved")
    with Buffer.connect(fresh_server.url, "restored") as restored:

        def emptied(*args: Any) -> None:
            restored.client.flushall()
            restored.client.function_flush()
            restore_task(*args)

        restore_task: Callable[..., None] = restored._restore_task
        with monkeypatch.context() as patch:
            patch.setattr(restored, "_restore_task", emptied)
            with pytest.raises(StoreLost):
                restored.restore(tmp_path / "saved")
        assert restored.client.dbsize() == 0
    with Buffer.connect(fresh_server.url, "restored") as again:
        again.restore(tmp_path / "saved")
        assert World(again).statuses() == {"completed": 2}


def test_a_library_that_another_program_replaced_is_an_error_with_the_remedy(world: World) -> None:
    world.start()
    library = f"#!lua name={library_name()}\nredis.register_function('{function_name('none')}', function() end)"
    world.buffer.client.function_load(library, replace=True)
    with pytest.raises(ServerRefused, match="run `rollq doctor --load-functions` as the operator"):
        world.buffer.counts("math")
    with pytest.raises(ServerRefused, match=f"`redis-cli function delete {library_name()}` to delete the library"):
        world.admit(1)
    world.buffer.client.function_delete(library_name())
    assert world.statuses() == {}
