"""Turns facts into findings: one pure function per check of a server or a folder.

Each check returns exactly one finding, `ok` if there is nothing to fix. An unreadable fact gives a note.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from shlex import quote
from statistics import median

from rollq.buffer.common.counting import count
from rollq.buffer.store.connection import unfit
from rollq.buffer.store.library import digest, library_name
from rollq.buffer.store.server_folder import FILES_FACTOR
from rollq.buffer.values.memory_use import FULL
from rollq.monitor.doctor.facts import ServerFacts, Space, is_loopback
from rollq.monitor.doctor.findings import Finding, Level
from rollq.monitor.doctor.libraries import Libraries, release_of, sort_libraries
from rollq.monitor.doctor.payloads import PayloadFacts
from rollq.monitor.doctor.sizing import maxmemory_for
from rollq.monitor.text.units import in_config, in_words

OTHER_SERVERS = {"dragonfly_version": "Dragonfly", "garnet_version": "Garnet"}
"""Field of INFO -> a server that has it, which speaks the protocol and reports a recent Redis version, but has no
functions."""
FORK_FACTOR = 1.5
"""Memory that the machine needs, as a multiple of maxmemory: a rewrite copies the pages that change during it."""
LONGEST_FORK_S = 1.0
LONGEST_MEDIAN_S = 0.010
LONGEST_PING_S = 1.0
LARGEST_SKEW_S = 5.0
DELAYED_FSYNCS = 10

Check = Callable[[ServerFacts], Finding]


def check_server_kind(facts: ServerFacts, *, in_cluster: bool = False) -> Finding:
    """Whether rollq can run on this server at all. With `in_cluster`, the server must be a node of a cluster; without
    it, it must not be one."""
    other = next((f"{name} {facts.info[key]}" for key, name in OTHER_SERVERS.items() if key in facts.info), "")
    refusal = f"{other} has no functions (FUNCTION, FCALL)" if other else unfit(facts.info, in_cluster=in_cluster)
    if not refusal and not facts.functions:
        refusal = f"{server_name(facts)} has no functions (FUNCTION, FCALL)"
    if refusal:
        message = f"{refusal}; rollq needs Redis 7.0 or Valkey 7.2 or newer"
        return _finding("server", Level.ERROR, message, "rollq redis --dir server")
    return _finding("server", Level.OK, f"{server_name(facts)}, with functions")


def check_functions(facts: ServerFacts) -> Finding:
    """Which releases have functions on this server, and whether roles use them."""
    if facts.libraries is None:
        return _finding("functions", Level.NOTE, "which functions the server has could not be read")
    libraries = sort_libraries(facts.libraries, facts.connections)
    is_loaded = library_name() in libraries.used
    parts = [f"the digest of this rollq is {digest()}{'' if is_loaded else ', whose functions are not loaded yet'}"]
    if used := [f"{release_of(name)} ({count})" for name, count in libraries.used.items() if count]:
        parts.append(f"connections use {', '.join(used)}")
    old, commands = _old_functions(facts, libraries)
    return _finding("functions", Level.NOTE if old else Level.OK, "; ".join([*parts, *old]), *commands)


def _old_functions(facts: ServerFacts, libraries: Libraries) -> tuple[list[str], list[str]]:
    """Functions that may be deleted, and the commands that delete them."""
    parts, commands = [], []
    unused, unknown = ", ".join(map(release_of, libraries.unused)), ", ".join(libraries.unknown)
    if unused and facts.connections is None:
        parts.append(f"only the operator may read whether roles use {unused}")
    elif unused:
        parts.append(f"no role uses {unused}")
        commands.append(f"rollq doctor {facts.settings} --clean")
    if unknown:
        parts.append(
            f"{unknown}: from releases that do not name their connections; delete these functions once no role of "
            "such a release runs"
        )
        commands += [f"{facts.cli} function delete {name}" for name in libraries.unknown]
    return parts, commands


def check_queue_kind(facts: ServerFacts) -> Finding:
    """Whether RQ's queue, which needs no functions, can use this server, which must not be a cluster."""
    if facts.info.get("cluster_enabled"):
        return _finding("server", Level.ERROR, "it is a node of a cluster, on which RQ does not run")
    return _finding("server", Level.OK, server_name(facts))


def server_name(facts: ServerFacts) -> str:
    """Kind and version of a server, as in `valkey 9.1.2`."""
    kind = "valkey" if "valkey_version" in facts.info else "redis"
    return f"{kind} {facts.info.get(f'{kind}_version', 'of unknown version')}"


def check_replication(facts: ServerFacts) -> Finding:
    """Whether the server is a primary, and which data a failover would lose."""
    if facts.info.get("role") == "slave":
        primary = f"{facts.info.get('master_host')}:{facts.info.get('master_port')}"
        message = f"it is a read-only replica: give the URL of its primary, {primary}"
        return _finding("replication", Level.ERROR, message, f"export ROLLQ_REDIS_URL=redis://{primary}/0")
    replicas = facts.number("connected_slaves")
    if not replicas:
        return _finding("replication", Level.OK, "a primary without replicas")
    known = count(replicas, "replica")
    if facts.config is None:
        return _finding("replication", Level.NOTE, f"{known}; min-replicas-to-write could not be read")
    if facts.config.get("min-replicas-to-write") == "0":
        message = f"{known}, but writes do not wait for any: a failover may lose everything since a replica hung"
        return _finding("replication", Level.WARNING, message, *_set(facts, "min-replicas-to-write 1"))
    return _finding("replication", Level.OK, f"{known}; writes stop when none follows")


def check_replicas(facts: ServerFacts) -> Finding:
    """Whether a primary of a cluster has a replica, without which a failover would lose its groups."""
    replicas = facts.number("connected_slaves")
    if not replicas:
        message = "this primary has no replica: its data is on its disk alone, and unavailable while it is down"
        return _finding("replicas", Level.ERROR, message, f"{facts.cli} cluster nodes")
    return _finding("replicas", Level.OK, f"replicas: {replicas}; a result counts when one of them has it")


def check_eviction(facts: ServerFacts) -> Finding:
    """Whether the server evicts data."""
    policy = facts.info.get("maxmemory_policy")
    if policy is None:
        return _finding("eviction", Level.NOTE, "maxmemory-policy could not be read; it must be noeviction")
    if policy != "noeviction":
        message = f"maxmemory-policy is {policy}: it silently drops groups when memory is full"
        return _finding("eviction", Level.ERROR, message, *_set(facts, "maxmemory-policy noeviction"))
    return _finding("eviction", Level.OK, "noeviction")


def check_memory(facts: ServerFacts) -> Finding:
    """Whether memory has a limit, and how much of it is used."""
    used, limit, total = map(facts.number, ("used_memory", "maxmemory", "total_system_memory"))
    if "maxmemory" not in facts.info:
        return _finding("memory", Level.NOTE, "maxmemory could not be read")
    if not limit:
        commands = _set(facts, f"maxmemory {in_config(int(total / FORK_FACTOR))}") if total else ()
        message = f"maxmemory is not set, {in_words(used)} used: the server grows until the system kills it"
        return _finding("memory", Level.WARNING, message, *commands)
    message = f"{in_words(used)} used, {used / limit:.0%} of maxmemory {in_words(limit)}"
    if used >= FULL * limit:
        message += f": above {FULL:.0%}, producers admit nothing; raise it, or let the trainer checkpoint"
        return _finding("memory", Level.ERROR, message, *_set(facts, f"maxmemory {in_config(2 * used)}"))
    return _finding("memory", Level.OK, message)


def check_fork(facts: ServerFacts) -> Finding:
    """Whether the machine has room for the copy that a rewrite of the append-only file may make."""
    total, fork_s = facts.number("total_system_memory"), facts.number("latest_fork_usec") / 1e6
    limit = facts.number("maxmemory") or facts.number("used_memory_rss")
    if not total:
        return _finding("fork", Level.NOTE, "the machine's memory could not be read")
    if FORK_FACTOR * limit > total:
        message = (
            f"the machine has {in_words(total)}; a rewrite of the append-only file may copy half of the server's "
            f"{in_words(limit)}"
        )
        return _finding(
            "fork", Level.WARNING, message, *_set(facts, f"maxmemory {in_config(int(total / FORK_FACTOR))}")
        )
    if fork_s > LONGEST_FORK_S:
        message = f"the last fork stopped the server for {fork_s:.1f} s; huge pages make forks slow"
        command = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return _finding("fork", Level.WARNING, message, command)
    return _finding("fork", Level.OK, f"{in_words(total)} of memory leave room for a rewrite")


def check_persistence(facts: ServerFacts) -> Finding:
    """Whether the run survives a restart of the server, and a power cut."""
    if "aof_enabled" not in facts.info:
        return _finding("persistence", Level.NOTE, "whether the append-only file is on could not be read")
    if not facts.number("aof_enabled"):
        return _without_file(facts)
    if facts.config is None:
        return _finding("persistence", Level.NOTE, "append-only file on; appendfsync could not be read")
    fsync = facts.config.get("appendfsync")
    if fsync == "no":
        message = "append-only file on, but appendfsync is no: a power cut loses up to half a minute"
        return _finding("persistence", Level.WARNING, message, *_set(facts, "appendfsync everysec"))
    loss = "nothing" if fsync == "always" else "up to the last second"
    return _finding("persistence", Level.OK, f"append-only file on, appendfsync {fsync}: a power cut loses {loss}")


def _without_file(facts: ServerFacts) -> Finding:
    commands = _set(facts, "appendonly yes")
    if facts.config and facts.config.get("save"):
        message = "the append-only file is off: a restart loses everything since the last snapshot (save)"
        return _finding("persistence", Level.WARNING, message, *commands)
    return _finding("persistence", Level.ERROR, "the append-only file is off: a restart loses the run", *commands)


def check_disk_writes(facts: ServerFacts) -> Finding:
    """Whether the server writes its files successfully and in time."""
    statuses = ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status")
    if failed := [name for name in statuses if facts.info.get(name, "ok") != "ok"]:
        message = f"the server cannot write its files ({', '.join(failed)}): check its log and its disk"
        return _finding(
            "disk writes", Level.ERROR, message, f"{facts.cli} config get dir", f"{facts.cli} config get logfile"
        )
    delayed = facts.number("aof_delayed_fsync")
    if delayed >= DELAYED_FSYNCS:
        message = f"the disk was too slow {delayed} times: writes waited, and a crash may lose more than a second"
        return _finding("disk writes", Level.WARNING, message, f"{facts.cli} config set no-appendfsync-on-rewrite yes",
                        f"{facts.cli} config resetstat")  # fmt: skip
    return _finding("disk writes", Level.OK, "all writes of its files succeeded")


def check_disk_space(facts: ServerFacts) -> Finding:
    """Whether the server's disk has room for its files."""
    if facts.space is None:
        message = "the server's disk is not on this machine, or its folder could not be read: look there"
        return _finding("disk space", Level.NOTE, message)
    free, needed = facts.space.free_bytes, FILES_FACTOR * (facts.number("maxmemory") or facts.number("used_memory"))
    message = f"{in_words(free)} free in {facts.space.path}"
    if free < needed:
        message += f": the server's files may take {in_words(needed)}, {FILES_FACTOR} times its memory"
        return _finding("disk space", Level.WARNING, message, f"df -h {facts.space.path}")
    return _finding("disk space", Level.OK, message)


def check_access(facts: ServerFacts) -> Finding:
    """Who may use the server."""
    if facts.open is None:
        return _finding("access", Level.NOTE, "whether the server asks for a password could not be read")
    if not facts.open:
        shared = ", which every role shares, and which may do anything" if facts.user == "default" else ""
        return _finding("access", Level.OK, f"asks for a password; user {facts.user or 'unknown'}{shared}")
    if facts.address.startswith("unix:"):
        return _finding("access", Level.OK, "no password; reached through a socket of this machine")
    return _access_without_password(facts)


def _access_without_password(facts: ServerFacts) -> Finding:
    if facts.local and facts.config is None:
        return _finding(
            "access", Level.NOTE, "no password; whether other machines can reach the server could not be read"
        )
    if facts.local and _refuses_others(facts.config or {}):
        return _finding("access", Level.NOTE, "no password; every user of this machine may do anything")
    message = (
        "no password: anyone who reaches the port can read, change and delete everything; on its machine, make users "
        "and restart it with them: `rollq redis --acl rollq.acl`, or `aclfile` in the configuration of another server "
        "(docs/guide/security.md)"
    )
    return _finding("access", Level.ERROR, message, *_make_users(facts))


def _make_users(facts: ServerFacts) -> Iterator[str]:
    """The commands that make users and, if the server has a configuration file, name the ACL file in it and stop the
    server."""
    yield f"rollq runs acl {facts.settings} --passwords passwords > rollq.acl"
    if file := facts.info.get("config_file"):
        yield f'echo "aclfile $PWD/rollq.acl" >> {quote(file)}'
        yield f"{facts.cli} shutdown"


def _refuses_others(config: Mapping[str, str]) -> bool:
    addresses = [address.lstrip("-") for address in config.get("bind", "").split()]
    return config.get("protected-mode") == "yes" or (bool(addresses) and all(map(is_loopback, addresses)))


def check_encryption(facts: ServerFacts) -> Finding:
    """Whether others on the network can read the traffic."""
    if facts.address.startswith("redis:") and not facts.local:
        message = "no TLS: the password and all samples travel unencrypted; give the server a tls-port"
        command = f"export ROLLQ_REDIS_URL={facts.address.replace('redis:', 'rediss:', 1)}"
        return _finding("encryption", Level.WARNING, message, command)
    how = "TLS" if facts.address.startswith("rediss:") else "not needed: the connection stays on this machine"
    return _finding("encryption", Level.OK, how)


def check_latency(facts: ServerFacts) -> Finding:
    """How long the server takes to answer."""
    middle_s, worst_s = median(facts.pings_s), max(facts.pings_s)
    message = f"{len(facts.pings_s)} pings: median {middle_s * 1000:.1f} ms, slowest {worst_s * 1000:.1f} ms"
    if worst_s > LONGEST_PING_S:
        message += ": the server stalled; look for slow commands"
        return _finding("latency", Level.WARNING, message, f"{facts.cli} slowlog get 10", f"{facts.cli} --latency")
    if middle_s > LONGEST_MEDIAN_S:
        message += ": every call of every role waits that long; run the server near the workers"
        return _finding("latency", Level.WARNING, message, f"{facts.cli} --latency")
    return _finding("latency", Level.OK, message)


def check_clock(facts: ServerFacts) -> Finding:
    """Whether this machine's clock agrees with the server's."""
    ahead_s = facts.clock_ahead_s
    if abs(ahead_s) > LARGEST_SKEW_S:
        direction = "ahead of" if ahead_s > 0 else "behind"
        message = f"the server's clock is {abs(ahead_s):.0f} s {direction} this machine's, which RQ and TLS compare"
        return _finding("clock", Level.WARNING, message, "timedatectl set-ntp true")
    return _finding("clock", Level.OK, f"within {math.ceil(abs(ahead_s) * 10) / 10:.1f} s of the server's")


BUFFER_CHECKS: Sequence[Check] = (
    check_server_kind,
    check_functions,
    check_replication,
    check_eviction,
    check_memory,
    check_fork,
    check_persistence,
    check_disk_writes,
    check_disk_space,
    check_access,
    check_encryption,
    check_latency,
    check_clock,
)
CLUSTER_CHECKS: Sequence[Check] = (
    partial(check_server_kind, in_cluster=True),
    check_replicas,
    *(check for check in BUFFER_CHECKS if check not in (check_server_kind, check_replication)),
)
"""The checks of each primary."""
QUEUE_CHECKS: Sequence[Check] = (
    check_queue_kind,
    check_eviction,
    check_memory,
    check_access,
    check_encryption,
    check_latency,
    check_clock,
)
"""The checks of the queue's server. The producer rewrites tickets, so they need no disk."""


def check_sizing(facts: ServerFacts, used: int, why: str) -> Finding:
    """Whether `maxmemory` is enough for a run that takes at most `used` bytes here; `why` describes the run's
    groups."""
    limit, needed = facts.number("maxmemory"), maxmemory_for(used)
    message = f"the run takes up to {in_words(used)} here ({why}), which needs a maxmemory of {in_words(needed)}"
    if not limit:
        return _finding("sizing", Level.NOTE, message)
    if limit < needed:
        message += f"; maxmemory is {in_words(limit)}, so production may stall"
        return _finding("sizing", Level.WARNING, message, *_set(facts, f"maxmemory {in_config(needed)}"))
    return _finding("sizing", Level.OK, message)


def check_payloads(facts: PayloadFacts, url: str, most_bytes: int) -> Finding:
    """Whether this machine can use the run's folder or bucket at `url`, and whether a folder has room for `most_bytes`
    in total."""
    if facts.trouble:
        return _finding("payloads", Level.ERROR, facts.trouble)
    message = f"an object could be written, read, listed and removed in {url}"
    if facts.space is None:
        return _finding("payloads", Level.OK, message)
    free, needed = facts.space.free_bytes, most_bytes - facts.taken_bytes
    message += f", which has {in_words(free)} free"
    if free < needed:
        message += f": groups may take {in_words(needed)} more"
        return _finding("payloads", Level.WARNING, message, f"df -h {quote(url)}")
    return _finding("payloads", Level.OK, message)


def check_weights_folder(space: Space, needed_bytes: int) -> Finding:
    """Whether the shared folder for weights is writable, and has room for the kept versions."""
    if not space.writable:
        message = f"{space.path} is not writable here: a trainer on this machine cannot publish"
        return _finding("weights", Level.WARNING, message, f"ls -ld {space.path}")
    message = f"{in_words(space.free_bytes)} free in {space.path}"
    if space.free_bytes < needed_bytes:
        message += f": the kept versions may take {in_words(needed_bytes)}"
        return _finding("weights", Level.WARNING, message, f"df -h {space.path}")
    return _finding("weights", Level.OK, message)


def check_weights_in_redis(model_bytes: int, limit_bytes: int) -> Finding:
    """Whether the model is small enough to travel through Redis."""
    if not model_bytes:
        return _finding(
            "weights", Level.NOTE, "through Redis; the model is not on this machine, so its size is unknown"
        )
    message = f"through Redis: the model has {in_words(model_bytes)}, the limit is {in_words(limit_bytes)}"
    if model_bytes > limit_bytes:
        return _finding("weights", Level.ERROR, f'{message}; set transport = "path" in [trainer]')
    return _finding("weights", Level.OK, message)


def _finding(check: str, level: Level, message: str, *commands: str) -> Finding:
    return Finding(check, level, message, commands)


def _set(facts: ServerFacts, directive: str) -> tuple[str, ...]:
    """The commands that set a directive now and, if the server has a configuration file, for later restarts."""
    commands = [f"{facts.cli} config set {directive}"]
    if facts.info.get("config_file"):
        commands.append(f"{facts.cli} config rewrite")
    return tuple(commands)
