"""The users of a run, with real logins on both kinds of server: what each may do, and that it may do nothing else."""

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError
from rq import Queue
from rq.executions import Execution
from rq.registry import StartedJobRegistry, clean_registries
from rq.worker import Worker

from rollq.buffer.archive.archiver import Archiver
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.errors import ConfigError, ServerRefused
from rollq.buffer.query.selection import Selection
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store import keys
from rollq.buffer.store.connection import Patience, open_client
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import RunKeys
from rollq.buffer.store.library import COMMON, READ_ONLY, digest, function_name, function_sources, library_name
from rollq.buffer.store.users import (
    READS,
    USERS,
    WRITES,
    Role,
    ServerUser,
    User,
    acl_lines,
    callers,
    functions_of,
    key_patterns,
    password_digest,
    rights,
    user_name,
)
from rollq.buffer.tickets import TicketJob, enqueue_tickets, open_queue
from rollq.buffer.values.rollouts import GroupResult, Status
from rollq.monitor.doctor.examine import measured_tasks
from rollq.monitor.status.read import read_status
from support.buffer_run import World, make_sample, text_of
from support.finished_groups import finished_groups
from support.waiting import wait_until

RUN, OTHER_RUN = "sums", "other"
NOBODY = """
acl|list acl|setuser|x|on acl|getuser|default acl|save bgrewriteaof bgsave client|kill|id|1 client|pause|1
cluster|nodes config|get|* config|set|maxmemory|1 dbsize debug|sleep|0 dump|k eval|return|0 evalsha|a|0 failover|abort
flushall flushdb function|flush function|restore|x function|dump keys|* latency|doctor memory|stats
migrate|h|1|k|0|1 module|list monitor object|encoding|k psync|?|-1 randomkey rename|a|b replconf|a|b
replicaof|no|one restore|k|0|x save scan|0 script|load|return script|flush script|kill shutdown|nosave slowlog|get
sort|k swapdb|0|1 sync slaveof|no|one
"""
"""Commands that no role may send, with arguments."""


LEVELS = {
    "-": (False, False, False),
    "read": (True, False, False),
    "copy": (False, True, False),
    "write": (True, True, True),
}
"""Level -> whether it allows to read, to drop, to write."""


@dataclass
class Users:
    """A server with the users of a run. Each has its own word as password, as in `worker`."""

    server: EmbeddedServer
    open: list[redis.Redis]

    def url(self, user: User) -> str:
        return self.server.url.replace("://", f"://{user_name(RUN, user)}@")

    def client(self, user: User, password: str | None = None) -> Any:
        self.open.append(open_client(self.url(user), password or user.value))
        return self.open[-1]

    def buffer(self, user: User) -> Buffer:
        buffer = Buffer.connect(self.url(user), RUN, password=user.value)
        self.open.append(buffer.client)
        return buffer


@pytest.fixture(scope="module", params=["valkey", "redis"])
def users(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    folder = tmp_path_factory.mktemp(request.param)
    binary = request.getfixturevalue("redis_binary") if request.param == "redis" else None
    acl = folder / "rollq.acl"
    lines = acl_lines(RUN, {user: password_digest(user.value) for user in USERS})
    acl.write_text("\n".join(lines) + "\n")
    with EmbeddedServer(folder / "server", binary=binary, acl=acl) as server:
        users = Users(server, [])
        users.buffer(Role.OPERATOR)  # loads the functions
        yield users
        for client in users.open:
            client.close()


@pytest.fixture(autouse=True)
def empty(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "users" in request.fixturenames:
        request.getfixturevalue("users").client(ServerUser.ADMIN).flushall()


def is_allowed(client: Any, *command: object) -> bool:
    """Whether the server lets this command through, however it then ends."""
    try:
        client.execute_command(*command)
    except NoPermissionError:
        return False
    except redis.ResponseError as error:
        return "command not allowed" not in str(error)  # DEBUG is refused to all users
    return True


# -- logging in


def test_nobody_enters_without_a_user_and_its_password(users: Users) -> None:
    with redis.Redis.from_url(users.server.url) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    with pytest.raises(redis.AuthenticationError):
        users.client(Role.WORKER, "trainer").ping()
    for user in USERS:
        assert users.client(user).ping()


def test_the_acl_file_has_digests_and_no_password() -> None:
    text = "\n".join(acl_lines(RUN, {user: password_digest(f"planted-{user.value}") for user in USERS}))
    assert "planted" not in text
    assert text.startswith("user default reset off\n")
    with pytest.raises(ConfigError, match="run name 'a b'"):
        acl_lines("a b", {})


# -- functions


@pytest.mark.parametrize("role", Role)
def test_a_role_calls_its_functions_and_no_other(users: Users, role: Role) -> None:
    client = users.client(role)
    own = functions_of(role)
    for name, source in function_sources().items():
        command = "FCALL_RO" if name in READ_ONLY else "FCALL"
        key = RunKeys(RUN).info if "-- KEYS: run" in source else f"rollq:{{{RUN}:math}}:clock"
        assert is_allowed(client, command, function_name(name), 1, key, "none") == (name in own), name
        assert not is_allowed(client, command, function_name(name), 1, key.replace(RUN, OTHER_RUN), "none")


def test_every_function_has_a_caller() -> None:
    assert [name for name, source in function_sources().items() if not callers(name, source)] == []


def test_callers_are_read_from_the_whole_line() -> None:
    head = "-- Caller: Leasing.lease; workers, and\n--   the trainer\n-- Repeat: a restore\n"
    assert callers("lease", head) == {Role.WORKER, Role.TRAINER}
    assert callers("counts", "-- Caller: A.b; every role\n") == set(Role)
    assert callers("reap", "-- Caller: A.producers; any role\n") == {Role.PRODUCER, Role.WORKER, Role.TRAINER}


def test_a_monitor_only_calls_functions_that_only_read() -> None:
    assert functions_of(Role.MONITOR) <= READ_ONLY


# -- commands and keys


@pytest.mark.parametrize("role", Role)
def test_no_role_may_send_what_reaches_beyond_its_keys(users: Users, role: Role) -> None:
    client = users.client(role)
    lists_keys = ["scan|0"] if role is Role.PRODUCER else []  # for its audit of payloads on a cluster
    assert [command for command in NOBODY.split() if is_allowed(client, *command.split("|"))] == lists_keys
    assert is_allowed(client, "FUNCTION", "LOAD", "nonsense") == (role is Role.OPERATOR)
    assert is_allowed(client, "FUNCTION", "DELETE", "none") == (role is Role.OPERATOR)


@pytest.mark.parametrize("role", Role)
def test_a_role_has_on_each_key_the_right_of_the_table_and_no_other(users: Users, role: Role) -> None:
    client = users.client(role)
    for key, levels in rights().items():
        for pattern in key_patterns(RUN, key):
            name = pattern.replace("*", "math")
            right = (
                is_allowed(client, "GET", name),
                is_allowed(client, "UNLINK", name),
                is_allowed(client, "SET", name, ""),
            )
            assert right == LEVELS[levels[role]], name
            elsewhere = name.replace(RUN, OTHER_RUN)
            assert not is_allowed(client, "GET", elsewhere)
            assert not is_allowed(client, "UNLINK", elsewhere)


def test_the_table_of_rights_has_every_key() -> None:
    listed = re.findall(r"^(rollq:\S+) +(?:hash|set|string|zset|stream|list|none) ", str(keys.__doc__), re.MULTILINE)
    assert set(listed) == set(rights())


def test_the_commands_inside_functions_are_known() -> None:
    source = "".join((*function_sources().values(), *common_functions().values()))
    used = {name.lower() for name in re.findall(r"(?:redis\.call|call_many)\(\s*'([A-Z]+)'", source)}
    assert len(used) > 30
    assert used - {"time", "publish"} <= {*READS.split(), *WRITES.split()}


@cache
def common_functions() -> dict[str, str]:
    """The functions that several files share, by name."""
    folder = Path(str(keys.__file__)).parents[1] / "lua" / "common"
    text = "".join((folder / f"{name}.lua").read_text() for name in COMMON)
    return {name: body for body, name in re.findall(r"^(local function (\w+)\(.*?^end)", text, re.DOTALL | re.M)}


@cache
def whole_source(name: str) -> str:
    """A function with all the shared functions that it uses."""
    shared, text, seen = common_functions(), function_sources()[name], set[str]()
    while found := {other for other in shared if re.search(rf"\b{other}\b", text)} - seen:
        text += "".join(shared[other] for other in found)
        seen |= found
    return text


@pytest.mark.long
def test_a_role_may_use_the_keys_that_its_functions_name() -> None:
    """A function that is refused half way would leave what it wrote until then."""
    of_runs = {name for name, source in function_sources().items() if "-- KEYS: run" in source}
    for role in Role:
        for name in functions_of(role):
            named = set(re.findall(r"'(\w+)(?::|')", whole_source(name)))
            for key, levels in rights().items():
                leaf = key.split("}:")[1].split(":")[0]
                is_own = key.startswith("rollq:{run}") == (name in of_runs)
                if leaf in named and is_own and leaf not in WORDS:
                    assert levels[role] != "-", f"{role} calls {name}, which names {key}"


WORDS = {"tasks", "model", "trainer", "run", "versions", "group", "manifest", "prompts", "rollout"}
"""Keys that are also names of fields, or that are tested below."""


# -- administrator and replicas


def allowed(users: Users, user: User, command: str) -> bool:
    """Whether the server would let `command`, with arguments between `|`, through. It does not run."""
    dry_run = ("ACL", "DRYRUN", user_name(RUN, user), *command.split("|"))
    return bool(users.client(ServerUser.ADMIN).execute_command(*dry_run) in (b"OK", True))


def test_the_administrator_may_do_everything_and_reaches_every_run(users: Users) -> None:
    assert [command for command in NOBODY.split() if not allowed(users, ServerUser.ADMIN, command)] == []
    admin = users.client(ServerUser.ADMIN)
    assert admin.config_set("maxmemory", 0)
    assert admin.set(RunKeys(OTHER_RUN).info, "")


def test_a_replica_may_follow_and_nothing_else(users: Users) -> None:
    commands = [*NOBODY.split(), "get|k", "set|k|v", "info", "acl|whoami", "subscribe|x", "ping"]
    found = [command for command in commands if allowed(users, ServerUser.REPLICA, command)]
    assert found == ["psync|?|-1", "replconf|a|b", "ping"]
    assert not is_allowed(users.client(ServerUser.REPLICA), "GET", RunKeys(RUN).info)


def test_a_replica_logs_in_and_follows(users: Users, tmp_path: Path) -> None:
    users.client(ServerUser.ADMIN).config_set("repl-diskless-sync-delay", 0)
    users.client(ServerUser.ADMIN).set("key", "followed")
    with EmbeddedServer(tmp_path, binary=users.server.binary) as other, redis.Redis.from_url(other.url) as replica:
        replica.config_set("masteruser", user_name(RUN, ServerUser.REPLICA))
        replica.config_set("masterauth", ServerUser.REPLICA.value)
        replica.replicaof("127.0.0.1", users.server.port)
        wait_until(lambda: replica.get("key") == b"followed")


# -- the queue of tickets


@pytest.mark.parametrize(
    ("role", "command", "allowed"),
    [
        (Role.PRODUCER, "RPUSH rq:queue:rollq-sums ticket-1", True),
        (Role.PRODUCER, "RPUSH rq:queue:mail ticket-1", False),
        (Role.PRODUCER, "RPUSH rq:queue:rollq-other ticket-1", False),
        (Role.PRODUCER, "HSET rq:job:ticket-1 data x", True),
        (Role.PRODUCER, "HSET rq:job:another data x", False),
        (Role.PRODUCER, "LMOVE rq:queue:rollq-sums rq:queue:rollq-sums:intermediate LEFT RIGHT", False),
        (Role.WORKER, "LMOVE rq:queue:rollq-sums rq:queue:rollq-sums:intermediate LEFT RIGHT", True),
        (Role.WORKER, "LMOVE rq:queue:mail rq:queue:rollq-sums:intermediate LEFT RIGHT", False),
        (Role.WORKER, "HGETALL rq:job:another", False),
        (Role.WORKER, "PUBLISH rq:pubsub:another {}", False),
        (Role.TRAINER, "LLEN rq:queue:rollq-sums", True),
        (Role.TRAINER, "RPUSH rq:queue:rollq-sums ticket-1", False),
        (Role.TRAINER, "LLEN rq:queue:mail", False),
        (Role.WORKER, "EXISTS rq:suspended", True),
        (Role.WORKER, "SET rq:suspended 1", False),
        (Role.PRODUCER, "RPUSH rq:suspended 1", False),
        (Role.MONITOR, "LLEN rq:queue:rollq-sums", True),
        (Role.MONITOR, "RPUSH rq:queue:rollq-sums ticket-1", False),
        (Role.MONITOR, "PUBLISH rollq:{sums}:events:put math", False),
        (Role.OPERATOR, "PUBLISH rq:pubsub:worker-1 {}", True),
        (Role.WORKER, "PUBLISH rollq:{sums}:events:put math", True),
        (Role.WORKER, "PUBLISH rollq:{other}:events put", False),
    ],
)
def test_roles_reach_the_tickets_of_their_run(users: Users, role: Role, command: str, allowed: bool) -> None:
    assert is_allowed(users.client(role), *command.split()) == allowed


# -- roles at work


def test_a_group_lives_its_whole_life_under_the_users_of_its_roles(users: Users, tmp_path: Path) -> None:
    producer, worker, trainer, monitor, operator, _ = (users.buffer(role) for role in Role)
    train = World(trainer).start(math={"max_uses": 2, "max_staleness": 2, "prompt_stats": True})
    make, schedule = World(worker), World(producer)
    worker.report_worker("w", {"state": "serving"})
    for step in (1, 2):
        assert schedule.admit(4) == 4
        leases = make.lease(4)
        worker.renew(leases[:1])
        worker.hand_back(leases[3:])
        make.put(leases[:3])
        train.train(step)
    trainer.checkpoint(train.held, 1)
    assert monitor.clock("math").step == 3
    assert monitor.query({"status": "completed"})
    assert "w" in monitor.workers()
    assert [monitor.replace_reported_state("training") for _ in range(2)] == [None, "training"]
    with pytest.raises(ServerRefused, match="permissions to access"):
        worker.replace_reported_state("training")
    operator.set_control("math", Control.PAUSE, "by hand")
    operator.save(tmp_path / "snapshot")
    make.buffer.reap("math")
    schedule.buffer.expire("math")
    with pytest.raises(ServerRefused, match="fcall"):
        monitor.set_control("math", Control.RUN, "")
    with pytest.raises(ServerRefused, match="fcall"):
        producer.publish(train.held, 3, uri="", digest="")
    World(users.buffer(ServerUser.ADMIN)).check()


def test_a_producer_sends_groups_back_that_lose_some_of_their_samples(users: Users) -> None:
    """Its user may not read samples, but must drop them."""
    trainer, producer, make = users.buffer(Role.TRAINER), users.buffer(Role.PRODUCER), World(users.buffer(Role.WORKER))
    admin = World(users.buffer(ServerUser.ADMIN))
    train = World(trainer).start(math={"batch_groups": 1, "max_staleness": 1, "partial_rollout": False})
    World(producer).admit(5)
    *whole, interrupted, small, large = make.lease(5)
    make.put(whole)
    make.buffer.put([GroupResult(interrupted, (make_sample(0), make_sample(0, status="a")))])
    assert producer.recycle("math", epoch=train.held.epoch, target=100, limit=100) == 1
    admin.check()
    train.train(1, math=1)
    for lease in (small, large):
        text = text_of(lease.group_id)
        make.buffer.put([GroupResult(lease, (make_sample(0, text=text), make_sample(1, text=text)))])
    train.train(2, math=1)
    assert producer.expire("math") == 2
    admin.check()
    assert train.statuses() == {"archived": 2, "pending": 1, "expired": 2}


def test_a_snapshot_is_restored_by_the_operator(users: Users, tmp_path: Path) -> None:
    world = World(users.buffer(Role.TRAINER)).start()
    World(users.buffer(Role.PRODUCER)).admit(3)
    make = World(users.buffer(Role.WORKER))
    make.put(make.lease(2))
    world.train(1)
    operator = MonitorBuffer(users.buffer(Role.OPERATOR).servers, RUN, Patience())
    assert measured_tasks(operator)["math"].payload_bytes > 0
    users.buffer(Role.OPERATOR).save(tmp_path / "snapshot")
    users.client(ServerUser.ADMIN).flushdb()
    users.buffer(Role.OPERATOR).restore(tmp_path / "snapshot")
    monitor = users.buffer(Role.MONITOR)
    assert World(monitor).statuses() == {"archived": 2, "pending": 1}
    assert len(monitor.page(Selection(("math",), tuple(Status))).groups) == 3
    assert len(monitor.page(Selection(("math",), tuple(Status), text="x")).groups) == 1
    assert monitor.overview("math", 10).task == "math"


@pytest.mark.parametrize("size", ["small", "large"])
def test_an_archiver_needs_no_other_rights(users: Users, tmp_path: Path, size: str) -> None:
    world = World(users.buffer(Role.TRAINER)).start(math={"archive": True, "max_uses": 2})
    World(users.buffer(Role.PRODUCER)).admit(3)
    make = World(users.buffer(Role.WORKER))
    make.put(make.lease(2), text=text_of(2) if size == "large" else "")
    make.put(make.lease(1), reward=None, status="f")
    world.train(1)
    world.buffer.checkpoint(world.held, 1)
    Archiver(users.buffer(Role.ARCHIVER), str(tmp_path)).finish(threading.Event())
    assert World(users.buffer(Role.MONITOR)).buffer.counts("math").dropped == {"trained": 2, "failed": 1}


@pytest.mark.parametrize("role", Role)
def test_a_role_reads_the_status_of_its_run(users: Users, role: Role) -> None:
    world = World(users.buffer(Role.TRAINER)).start(math={"archive": True})
    world.begin(0, launch_id="second")
    assert read_status(users.buffer(role), queue_of(users, role)).tasks[0].task == "math"


def queue_of(users: Users, role: Role) -> Any:
    url = users.url(role)
    queue = open_queue(url, RUN, password=role.value)
    users.open.append(queue.connection)
    return queue


def test_tickets_pass_between_the_users_of_producer_and_worker(users: Users) -> None:
    assert len(enqueue_tickets(queue_of(users, Role.PRODUCER), RUN, 3, 4)) == 3
    assert queue_of(users, Role.MONITOR).count == 3
    assert queue_of(users, Role.WORKER).count == 3


def test_a_worker_may_clean_up_after_another_that_died(users: Users) -> None:
    enqueue_tickets(queue_of(users, Role.PRODUCER), RUN, 2, 1)
    queue = queue_of(users, Role.WORKER)
    client, waiting = queue.connection, queue.intermediate_queue
    popped, started = (client.lmove(queue.key, queue.intermediate_queue_key).decode() for _ in range(2))
    execution, registry = Execution("1", started, client, "dead"), StartedJobRegistry(queue=queue, job_class=TicketJob)
    with client.pipeline(transaction=False) as pipe:
        execution.save(1, pipe)
        registry.add_execution(execution, pipe, 1)
        pipe.execute()
    client.zadd(registry.key, {f"{started}:1": 1})
    client.lrem(queue.intermediate_queue_key, 1, started)
    client.set(waiting.get_first_seen_key(popped), 1)
    clean_registries(queue)
    waiting.cleanup(Worker([queue], connection=client, prepare_for_work=False), queue)
    assert sorted(queue.failed_job_registry.get_job_ids()) == sorted([popped, started])


def test_only_the_operator_loads_functions(users: Users) -> None:
    World(users.buffer(Role.TRAINER)).start()
    producer = World(users.buffer(Role.PRODUCER))
    users.client(Role.OPERATOR).function_delete(library_name())
    for role_needs_them in (lambda: users.buffer(Role.TRAINER), lambda: producer.admit(1)):
        with pytest.raises(ServerRefused, match="run `rollq doctor --load-functions` as the operator"):
            role_needs_them()
    users.buffer(Role.OPERATOR)
    assert users.buffer(Role.TRAINER)
    assert producer.admit(1) == 1


def test_a_role_of_another_release_calls_its_functions(users: Users) -> None:
    """`also` adds a second name for each function."""
    ours, both = (
        acl_lines(RUN, {Role.WORKER: password_digest("w")}, also)[1] for also in ((), ("0123456789ab", digest()))
    )
    added = set(calls_of(both.replace("(", " "))) - set(calls_of(ours.replace("(", " ")))
    names = functions_of(Role.WORKER)
    assert added == {f"+fcall{'_ro' * (name in READ_ONLY)}|rollq_0123456789ab_{name}" for name in names}
    assert len(both.split()) == len(ours.split()) + len(names)


def test_only_the_operator_lists_connections(users: Users) -> None:
    assert [role for role in Role if allowed(users, role, "client|list")] == [Role.OPERATOR]


def test_a_user_of_an_older_acl_file_is_refused_with_the_remedy(users: Users) -> None:
    """It may not name its connections."""
    rules = acl_lines(RUN, {Role.WORKER: ""})[1].partition(" on # ")[2].replace("+client|setname ", "")
    users.client(ServerUser.ADMIN).execute_command("ACL", "SETUSER", "old", "on", ">old", *calls_of(rules))
    with pytest.raises(ServerRefused, match="after an upgrade, make the ACL file again with `rollq runs acl`"):
        Buffer.connect(users.server.url.replace("://", "://old:old@"), RUN)


@pytest.mark.parametrize("role", [Role.PRODUCER, Role.WORKER, Role.TRAINER])
def test_every_role_may_bring_an_edited_file(users: Users, role: Role) -> None:
    file = TaskRules(batch_groups=2, group_size=2)
    with users.buffer(Role.TRAINER) as first:
        first.create_run()
        first.register_task("math", file)
    with users.buffer(role) as buffer:
        buffer.register_task("math", file.model_copy(update={"max_staleness": 3, "batch_groups": 4}))
        assert (buffer.clock("math").rules.max_staleness, buffer.clock("math").rules_revision) == (3, 2)


def test_the_operator_alone_starts_a_run_with_finished_groups(users: Users) -> None:
    rules = TaskRules(batch_groups=2, group_size=2, offline=True)
    with users.buffer(Role.OPERATOR) as operator:
        operator.create_run()
        operator.register_task("demos", rules)
        assert operator.insert("demos", finished_groups(2), source="expert") == 2
    with users.buffer(Role.PRODUCER) as producer, pytest.raises(ServerRefused, match="rollq runs acl"):
        producer.insert("demos", finished_groups(1), source="planted")
    with users.buffer(Role.TRAINER) as trainer:
        assert trainer.counts("demos").progress["inserted"] == 2


def test_a_user_that_may_not_look_for_keys_deletes_nothing(users: Users) -> None:
    with users.buffer(Role.TRAINER) as trainer:
        World(trainer).start()
        trainer.send("HSET", trainer.keys.trainer, "deadline_ms", 1)
    with users.buffer(Role.OPERATOR) as operator:
        with pytest.raises(ServerRefused, match="scan"):
            operator.delete_run(Queue("unused", connection=operator.client))
        assert operator.tasks() == ["math"]


def test_a_right_that_is_missing_inside_a_function_is_said_with_the_remedy(users: Users) -> None:
    World(users.buffer(Role.TRAINER)).start()
    calls = f"(+fcall|{function_name('register_task')} ~*) (+hget ~none)"
    admin = users.client(ServerUser.ADMIN)
    admin.execute_command("ACL", "SETUSER", "poor", "on", ">poor", "+@connection", "+info", *calls_of(calls))
    with (
        Buffer.connect(users.server.url.replace("://", "://poor:poor@"), RUN) as buffer,
        pytest.raises(ServerRefused, match=r"script.* - use the user of the role .* again with `rollq runs acl`"),
    ):
        buffer.call(
            "register_task", keys.task_keys(RUN, "math").clock, "incarnation", "events", 1, "nonce", 0, 0, "{}", "", ""
        )


def test_a_right_that_is_missing_inside_a_call_with_payloads_is_said_with_the_remedy(users: Users) -> None:
    world = World(users.buffer(Role.TRAINER)).start()
    World(users.buffer(Role.PRODUCER)).admit(2)
    leases = World(users.buffer(Role.WORKER)).lease(2)
    admin = users.client(ServerUser.ADMIN)
    rules = acl_lines(RUN, {Role.WORKER: ""})[1].partition(" on # ")[2].replace("+rpush ", "")
    admin.execute_command("ACL", "SETUSER", "poor", "on", ">poor", *calls_of(rules))
    with Buffer.connect(users.server.url.replace("://", "://poor:poor@"), RUN) as buffer:
        for lease in leases:  # a small result, and a large one
            with pytest.raises(ServerRefused, match=r"again with `rollq runs acl`"):
                World(buffer).put([lease])
    assert world.buffer.counts("math")


def calls_of(rules: str) -> list[str]:
    """Rules of an ACL as arguments: a selector is one."""
    return re.findall(r"\([^)]*\)|\S+", rules)


# -- what a role's password could do, as docs/guide/security.md says


def group(group_id: int) -> str:
    return keys.task_keys(RUN, "math").group(group_id)


def rollout(group_id: int) -> str:
    return keys.task_keys(RUN, "math").rollout(group_id)


def payload(group_id: int, nonce: str = "cafe") -> str:
    return keys.task_keys(RUN, "math").payload(group_id, nonce)


@pytest.mark.parametrize(
    ("role", "attack", "works"),
    [
        (Role.PRODUCER, lambda client: client.set(payload(1), b"planted"), False),
        (Role.PRODUCER, lambda client: client.get(payload(1)), False),
        (Role.MONITOR, lambda client: client.get(payload(1)), True),
        (Role.WORKER, lambda client: client.set(RunKeys(RUN).info, b"planted"), True),
        (Role.WORKER, lambda client: client.hset(RunKeys(RUN).model, "digest", "planted"), False),
        (Role.WORKER, lambda client: client.set(RunKeys(RUN).weights("planted", 0), b""), False),
        (Role.PRODUCER, lambda client: client.hset(rollout(1), "0", b"planted"), False),
        (Role.PRODUCER, lambda client: client.hgetall(rollout(1)), False),
        (Role.PRODUCER, lambda client: client.copy(group(1), rollout(1)), False),
        (Role.PRODUCER, lambda client: client.copy(rollout(1), group(1)), False),
        (Role.PRODUCER, lambda client: client.get(RunKeys(RUN).weights("planted", 0)), False),
        (Role.MONITOR, lambda client: client.hgetall(rollout(1)), True),
        (Role.MONITOR, lambda client: client.set(payload(1), b"planted"), False),
        (Role.MONITOR, lambda client: client.hset(rollout(1), "0", b"planted"), False),
        (Role.WORKER, lambda client: client.unlink(keys.task_keys(RUN, "math").clock), True),
        (Role.PRODUCER, lambda client: client.unlink(group(1)), True),
    ],
)
def test_a_stolen_password_does_what_the_guide_says(
    users: Users, role: Role, attack: Callable[[Any], Any], works: bool
) -> None:
    if works:
        attack(users.client(role))
    else:
        with pytest.raises(NoPermissionError):
            attack(users.client(role))
