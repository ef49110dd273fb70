"""A run's users on the server and their rights: one user per role, an administrator, and one user for replicas.
Pure: makes the lines of an ACL file.

A function runs with its caller's rights, so a user needs its role's functions and also the commands inside them. These
commands are limited to the keys that the role needs, which `RIGHTS` lists. The line `Caller:` at the head of a
function's file says which role calls it. No role gets scripts, `KEYS`, `CONFIG` or anything else that reaches beyond
its run's keys, with two exceptions: the operator loads and deletes functions, lists clients and reloads the ACL file,
and the producer lists the names of all keys.
"""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache

from rollq.buffer.store.keys import RunKeys
from rollq.buffer.store.library import READ_ONLY, digest, function_name, function_sources
from rollq.buffer.values.rollouts import Status


class Role(StrEnum):
    """A run's roles. Each role logs in as a separate user."""

    PRODUCER = "producer"
    WORKER = "worker"
    TRAINER = "trainer"
    MONITOR = "monitor"
    OPERATOR = "operator"
    ARCHIVER = "archiver"


class ServerUser(StrEnum):
    """Users that manage the server. No role logs in as such a user."""

    ADMIN = "admin"  # the only one that may change the server
    REPLICA = "replica"  # a replica logs in to its primary as this user


User = Role | ServerUser
USERS: Sequence[User] = (*Role, *ServerUser)
SERVER_RULES: Mapping[ServerUser, str] = {
    ServerUser.ADMIN: "~* &* +@all",
    ServerUser.REPLICA: "+psync +replconf +ping",
}


RIGHTS = """
key                                 producer  worker  trainer  monitor  operator  archiver
rollq:{run:task}:group:<id>         write     write   write    read     write     write
rollq:{run:task}:rollout:<id>       copy      write   write    read     write     write
rollq:{run:task}:payload:<id>:<nonce> copy    write   write    read     write     write
rollq:{run:task:<id>}:payload:<name> copy     write   write    read     write     read
rollq:{run:task}:garbage            write     write   write    -        write     write
rollq:{run:task}:shared             write     write   write    -        write     write
rollq:{run:task}:<status>           write     write   write    read     write     write
rollq:{run:task}:by_version         write     write   write    read     write     write
rollq:{run:task}:suspects           write     write   write    read     write     write
rollq:{run:task}:generating         write     write   write    read     write     write
rollq:{run:task}:offers             write     write   write    -        write     write
rollq:{run:task}:clock              write     write   write    read     write     write
rollq:{run:task}:clock:absent       read      read    read     read     read      read
rollq:{run:task}:rules              write     write   write    read     write     read
rollq:{run:task}:mark               write     write   write    -        write     write
rollq:{run:task}:progress           write     write   write    read     write     write
rollq:{run:task}:outcomes           write     write   write    read     write     read
rollq:{run:task}:last_error         write     write   write    read     write     read
rollq:{run:task}:batch:<handle>     write     write   write    read     write     read
rollq:{run:task}:batch:<handle>:groups write  write   write    read     write     read
rollq:{run:task}:batches            write     read    write    read     write     read
rollq:{run:task}:batches_over       write     read    write    read     write     read
rollq:{run:task}:manifest:<step>    write     write   write    read     write     read
rollq:{run:task}:archive            read      read    read     read     write     write
rollq:{run:task}:prompts            write     write   read     -        write     -
rollq:{run:task}:prompt_file        write     read    read     read     write     read
rollq:{run:task}:excluded           read      read    read     read     write     read
rollq:{run:task}:producers          write     write   write    read     write     read
rollq:{run:task}:too_long           write     write   -        -        write     -
rollq:{run:task}:unusable           write     read    read     read     write     read
rollq:{run:task}:unusable_rows      write     -       -        -        write     -
rollq:{run:task}:sources            write     -       -        read     write     -
rollq:{run:task}:grant:<nonce>      -         write   -        -        -         -
rollq:{run:task}:window             -         write   write    -        -         -
rollq:{run:task}:timings            -         write   write    -        -         -
rollq:{run:task}:history            write     write   write    read     read      read
rollq:{run}:run                     write     write   write    read     write     read
rollq:{run}:run:absent              read      read    read     read     read      read
rollq:{run}:mark                    write     write   write    -        write     write
rollq:{run}:tasks                   write     write   write    read     write     read
rollq:{run}:workers                 read      write   read     read     read      read
rollq:{run}:orders                  -       write   -        -        write     -
rollq:{run}:fleet                   -       write   -        -        -         -
rollq:{run}:fleet_seen              -       write   -        -        -         -
rollq:{run}:rounds                  -         write   write    -        -         -
rollq:{run}:round:<n>               -         write   write    -        -         -
rollq:{run}:model                   read      read    write    read     read      read
rollq:{run}:model_version           read      read    write    read     read      read
rollq:{run}:trainer                 read      read    write    read     write     read
rollq:{run}:curves                  read      read    write    read     write     read
rollq:{run}:evaluations             read      read    write    read     write     read
rollq:{run}:versions                -         -       write    read     write     read
rollq:{run}:published               -         -       write    -        -         -
rollq:{run}:launches                -         -       write    -        -         -
rollq:{run}:reported_state          -         -       -        write    write     -
rollq:{run}:plan:<step>             read    read    write    read     write     read
rollq:{run}:weights                 -         -       write    -        -         -
rollq:{run}:weights:<digest>:<n>    -         read    write    -        -         -
"""
"""Each role's right on each key. `write` includes `read`. `copy` allows dropping a key or its fields, asking whether it
has a field and how long that field is, and copying one key to another, but neither reading nor writing. The operator
writes because `rollq snapshot load` does."""

READS = (
    "get exists hexists hget hgetall hlen hmget hrandfield hscan hstrlen hvals llen lrange smembers srandmember strlen "
    "xrange xread zcard zcount zrandmember zrange zrangebyscore zrevrange zscore"
)
WRITES = (
    "copy del expire hdel hincrby hset hsetnx incr lpop lrem ltrim persist rpush sadd set srem unlink "
    "xadd zadd zpopmin zrem zremrangebyrank zremrangebyscore"
)
DROPS = "hdel hexists hstrlen unlink"

EVERYONE = (
    "ping info time select cluster|slots client|setname acl|whoami function|list function|stats subscribe unsubscribe"
)
QUEUE_EVERYONE = "hget hgetall hmget exists llen lrange smembers zcard zrange"
QUEUE_PRODUCER = "expire hset persist rpush sadd"
QUEUE_WORKER = (
    "blmove blpop del expire get hdel hincrby hincrbyfloat hset lmove lpush lrem persist rpush sadd set srem type "
    "unlink watch xadd xrevrange zadd zrangebyscore zrem zremrangebyscore zscore"
)
TRANSACTIONS = "multi exec discard unwatch"
QUEUE_COMMANDS: Mapping[Role, str] = {
    Role.PRODUCER: f"{QUEUE_EVERYONE} {QUEUE_PRODUCER}",
    Role.WORKER: f"{QUEUE_EVERYONE} {QUEUE_WORKER}",
    Role.TRAINER: QUEUE_EVERYONE,  # it only counts tickets, for `rollq status`, its health check
    Role.ARCHIVER: QUEUE_EVERYONE,  # likewise
    Role.MONITOR: QUEUE_EVERYONE,
    Role.OPERATOR: QUEUE_EVERYONE,
}
"""RQ's and rollq's commands on RQ's keys, by role."""
QUEUE_KEYS = (
    "rq:queues rq:queue:{queue} rq:queue:{queue}:* rq:queue:{queue}-* rq:wip:{queue}* rq:finished:{queue}* "
    "rq:failed:{queue}* rq:deferred:{queue}* rq:scheduled:{queue}* rq:canceled:{queue}* rq:clean_registries:{queue}* "
    "rq:workers rq:workers:{queue}* rq:worker:* rq:groups "
    "rq:job:ticket-* rq:job::ticket-* rq:execution:ticket-* rq:executions:ticket-* rq:results:ticket-*"
)

CALLERS: Mapping[str, tuple[Role, ...]] = {
    r"producers?|coordinators?": (Role.PRODUCER,),
    r"workers?": (Role.WORKER,),
    r"trainer": (Role.TRAINER,),
    r"every role|any role|roles that": (Role.PRODUCER, Role.WORKER, Role.TRAINER),
    r"monitors?": (Role.MONITOR, Role.OPERATOR),
    r"operators?|a save|a restore": (Role.OPERATOR,),
    r"archivers?": (Role.ARCHIVER,),
}
"""Words after the method in a `Caller:` line -> the roles that they mean."""


def acl_lines(run: str, password_digests: Mapping[User, str], also: Collection[str] = ()) -> list[str]:
    """The lines of an ACL file for `run`: no default user, and a user `<run>-<user>` for each of `password_digests`.

    `password_digests` come from `password_digest`. `also` holds digests of other releases whose functions the roles may
    call. Raises `ConfigError` for an invalid run name.
    """
    RunKeys(run)
    releases = (digest(), *also)
    users = [
        f"user {user_name(run, user)} reset on #{password} {_rules(run, user, releases)}"
        for user, password in password_digests.items()
    ]
    return ["user default reset off", *users]


def user_name(run: str, user: User) -> str:
    """The login name for a user of `run`."""
    return f"{run}-{user.value}"


def password_digest(password: str) -> str:
    """The form in which an ACL file holds a password."""
    return hashlib.sha256(password.encode()).hexdigest()


@cache
def functions_of(role: Role) -> frozenset[str]:
    """The names of the functions that a role may call."""
    return frozenset(name for name, source in function_sources().items() if role in callers(name, source))


def callers(name: str, source: str) -> set[Role]:
    """The roles that call the function `name`, according to its source's head. If a function only reads, "every role"
    includes the monitor, the operator and the archiver."""
    matched = re.search(r"^-- Caller: [^;]*; (.*(?:\n--   .*)*)", source, re.MULTILINE)
    words = matched[1] if matched else ""
    roles = {role for pattern, roles in CALLERS.items() if re.search(rf"\b({pattern})\b", words) for role in roles}
    if name in READ_ONLY and re.search(r"\bevery role\b", words):
        roles |= {Role.MONITOR, Role.OPERATOR, Role.ARCHIVER}
    return roles


@cache
def rights() -> Mapping[str, Mapping[Role, str]]:
    """`RIGHTS` by key and role."""
    header, *rows = (line.split() for line in RIGHTS.strip().splitlines())
    roles = [Role(name) for name in header[1:]]
    return {key: dict(zip(roles, words, strict=True)) for key, *words in rows}


def key_patterns(run: str, key: str) -> list[str]:
    """The ACL patterns that match a key from `RIGHTS` in `run`, with all ids and all tasks."""
    if key.endswith(":<status>"):
        return [key_patterns(run, key.replace("<status>", status.value))[0] for status in Status]
    return [re.sub(r"<\w+>", "*", re.sub("{run:task[^}]*}", f"{{{run}:*}}", key).replace("{run}", f"{{{run}}}"))]


def _rules(run: str, user: User, releases: Sequence[str]) -> str:
    return SERVER_RULES[user] if isinstance(user, ServerUser) else _role_rules(run, user, releases)


def _role_rules(run: str, role: Role, releases: Sequence[str]) -> str:
    events = f"&{RunKeys(run).events}:*"
    selectors = [_function_rules(run, role, releases), *_key_rules(run, role), *_queue_rules(run, role)]
    own = f"{_allow(EVERYONE)}{_allow(_extras(role))}{events}"
    return " ".join([own, *(f"({selector})" for selector in selectors)])


def _extras(role: Role) -> str:
    """Commands without a key that not every role has. `publish` reaches only the run's channels."""
    if role is Role.OPERATOR:
        return f"publish wait {TRANSACTIONS} function|load function|delete client|list acl|load"
    if role is Role.PRODUCER:  # its audit of payloads on a cluster lists all keys, but it can read only its run's
        return f"publish wait scan {TRANSACTIONS}"
    return "" if role is Role.MONITOR else f"publish wait {TRANSACTIONS}"


def _function_rules(run: str, role: Role, releases: Sequence[str]) -> str:
    """Rules for calling functions. A call names the key of its clock or run, and sometimes payloads. The server assumes
    that the call writes these keys, unless it is FCALL_RO."""
    names = sorted(functions_of(role))
    calls = " ".join(
        f"{'fcall_ro' if name in READ_ONLY else 'fcall'}|{function_name(name, release)}"
        for release in dict.fromkeys(releases)
        for name in names
    )
    mark = "~" if set(names) - READ_ONLY else "%R~"
    payloads = _keys(run, {key: roles[role] for key, roles in rights().items() if ":payload:" in key}, ("write",), "~")
    return f"{_allow(calls)}{mark}{RunKeys(run).info} {mark}rollq:{{{run}:*}}:clock {payloads}".rstrip()


def _key_rules(run: str, role: Role) -> Iterator[str]:
    levels = {key: roles[role] for key, roles in rights().items()}
    yield f"{_allow(READS)}{_keys(run, levels, ('read', 'write'), '%R~')}"
    if written := _keys(run, levels, ("write",), "~"):
        yield f"{_allow(WRITES)}{written}"
    if copied := _keys(run, levels, ("copy",), "~"):
        yield f"+copy {copied}"
        yield f"{_allow(DROPS)}{copied} ~rollq:{{{run}:*}}:group:*"  # one command drops a group's hash and its rollouts


def _keys(run: str, levels: Mapping[str, str], wanted: Collection[str], mark: str) -> str:
    keys = [key for key, level in levels.items() if level in wanted]
    return " ".join(f"{mark}{pattern}" for key in keys for pattern in key_patterns(run, key))


def _queue_rules(run: str, role: Role) -> Iterator[str]:
    if role not in QUEUE_COMMANDS:
        return
    mark = "~" if role in (Role.PRODUCER, Role.WORKER) else "%R~"
    keys = QUEUE_KEYS.format(queue=RunKeys(run).queue()).split()
    yield f"{_allow(QUEUE_COMMANDS[role])}{' '.join(mark + key for key in keys)}"
    yield "+exists %R~rq:suspended"  # writing it would suspend the workers of all applications
    if role is Role.WORKER:
        yield f"+subscribe +unsubscribe &rq:pubsub:* &{RunKeys(run).events}:*"  # one command asks for both
    if role is Role.OPERATOR:
        yield "+publish &rq:pubsub:*"


def _allow(commands: str) -> str:
    return "".join(f"+{command} " for command in commands.split())
