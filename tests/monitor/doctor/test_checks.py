"""Each check, on facts that no server here can be brought to report."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.store.library import connection_name, digest, library_name
from rollq.monitor.doctor.checks import (
    BUFFER_CHECKS,
    check_access,
    check_clock,
    check_disk_space,
    check_disk_writes,
    check_encryption,
    check_fork,
    check_functions,
    check_latency,
    check_queue_kind,
    check_server_kind,
    check_sizing,
    check_weights_folder,
    check_weights_in_redis,
)
from rollq.monitor.doctor.facts import ServerFacts, Space
from rollq.monitor.doctor.findings import Level
from rollq.monitor.doctor.libraries import sort_libraries

GIB = 2**30
FACTS = ServerFacts(
    address="rediss://10.0.0.1:6379/0",
    cli="redis-cli -h 10.0.0.1 -p 6379 --tls --askpass",
    settings="rollq.toml",
    info={
        "redis_version": "7.2.4",
        "valkey_version": "9.1.2",
        "role": "master",
        "maxmemory_policy": "noeviction",
        "maxmemory": 8 * GIB,
        "used_memory": GIB,
        "total_system_memory": 16 * GIB,
        "aof_enabled": 1,
        "config_file": "/etc/valkey.conf",
    },
    config={"appendfsync": "everysec", "save": "", "bind": "*", "protected-mode": "no", "min-replicas-to-write": "0"},
    functions=True,
    libraries=(library_name(), "rollq_0123456789ab", "another"),
    connections=("rollq-0123456789ab", "rollq-0123456789ab", "name", connection_name(library_name())),
    user="worker",
    open=False,
    local=False,
    pings_s=(0.001,) * 20,
    clock_ahead_s=0.01,
    space=None,
)
DRAGONFLY = """redis_version:7.4.0
dragonfly_version:df-v2.0.0
redis_mode:standalone
maxmemory:48540578611
maxmemory_policy:noeviction
used_memory:6784704
role:master
connected_slaves:0
cluster_enabled:0"""
GARNET = """garnet_version:2.2.0
server_name:garnet
redis_version:7.4.3
redis_mode:standalone
total_system_memory:8589934592
role:master
connected_slaves:0
cluster_enabled:0
rdb_last_bgsave_status:ok"""
"""What these servers reply to INFO, as far as a check reads it; neither can be installed where the tests run."""


def parsed(text: str) -> dict[str, Any]:
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return {name: int(value) if value.isdecimal() else value for name, value in fields.items()}


def with_info(**fields: Any) -> ServerFacts:
    return replace(FACTS, info={**FACTS.info, **fields})


def test_all_is_well_on_a_server_set_up_as_the_guide_says() -> None:
    assert {check(FACTS).level for check in BUFFER_CHECKS if check is not check_disk_space} == {Level.OK}


@pytest.mark.parametrize(("text", "name"), [(DRAGONFLY, "Dragonfly df-v2.0.0"), (GARNET, "Garnet 2.2.0")])
@pytest.mark.parametrize("functions", [False, True])  # a user who may not ask counts as having them
def test_servers_without_functions_are_named_by_what_they_say_of_themselves(
    text: str, name: str, functions: bool
) -> None:
    facts = replace(FACTS, info=parsed(text), functions=functions, config=None)
    finding = check_server_kind(facts)
    assert (finding.level, finding.message.startswith(f"{name} has no functions")) == (Level.ERROR, True)
    assert [check(facts).check for check in BUFFER_CHECKS]  # whatever else they do not report stops no check
    assert check_queue_kind(facts).level is Level.OK


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"valkey_version": "7.0.1"}, "it is valkey 7.0.1"),
        ({"cluster_enabled": 1}, "it is a node of a cluster"),
    ],
)
def test_servers_that_rollq_refuses_are_errors(fields: dict[str, Any], words: str) -> None:
    finding = check_server_kind(with_info(**fields))
    assert (finding.level, finding.message.partition(";")[0]) == (Level.ERROR, words)


def test_releases_in_use_are_listed_with_their_connections() -> None:
    finding = check_functions(FACTS)
    assert finding.level is Level.OK
    assert finding.message.startswith(f"the digest of this rollq is {digest()}; connections use ")
    assert f"{digest()} (1)" in finding.message
    assert "0123456789ab (2)" in finding.message
    assert "another" not in finding.message
    fresh = check_functions(replace(FACTS, libraries=(), connections=()))
    assert (fresh.level, fresh.message) == (
        Level.OK, f"the digest of this rollq is {digest()}, whose functions are not loaded yet"
    )  # fmt: skip


def test_a_release_that_no_role_uses_is_found_with_the_command() -> None:
    finding = check_functions(replace(FACTS, connections=("rollq-0123456789ac", "rollq_0123456789ab")))
    assert (finding.level, finding.commands) == (Level.NOTE, ("rollq doctor rollq.toml --clean",))
    assert finding.message.endswith("; no role uses 0123456789ab")


def test_an_old_library_is_left_to_the_operator() -> None:
    finding = check_functions(replace(FACTS, libraries=(*(FACTS.libraries or ()), "rollq_5")))
    assert (finding.level, finding.commands) == (Level.NOTE, (f"{FACTS.cli} function delete rollq_5",))
    assert "rollq_5" in finding.message


def test_a_user_who_may_not_list_connections_learns_it() -> None:
    blind = check_functions(replace(FACTS, connections=None))
    assert (blind.level, blind.commands) == (Level.NOTE, ())
    assert "only the operator may read whether roles use 0123456789ab" in blind.message
    assert check_functions(replace(FACTS, connections=None, libraries=(library_name(),))).level is Level.OK
    assert check_functions(replace(FACTS, libraries=None)).level is Level.NOTE


def test_only_unused_libraries_of_other_releases_may_be_deleted() -> None:
    names = ["rollq_0123456789ab", "rollq_aaaaaaaaaaaa", "rollq_123456789012", "rollq_5", "rollq_x", "a"]
    found = sort_libraries([library_name(), *names], ["rollq-0123456789ab", "rollq-5"])
    assert found.unused == ["rollq_123456789012", "rollq_aaaaaaaaaaaa"]
    assert found.used == {library_name(): 0, "rollq_0123456789ab": 1}
    assert found.unknown == ["rollq_5"]


def test_a_queue_on_a_cluster_is_an_error() -> None:
    assert check_queue_kind(with_info(cluster_enabled=1)).level is Level.ERROR
    assert check_queue_kind(replace(FACTS, functions=False)).level is Level.OK


def test_a_configuration_file_is_rewritten_too() -> None:
    small = check_sizing(with_info(maxmemory=GIB), 2 * GIB, "9 groups")
    assert small.commands == (f"{FACTS.cli} config set maxmemory 2663mb", f"{FACTS.cli} config rewrite")
    assert small.level is Level.WARNING
    assert check_sizing(FACTS, 2 * GIB, "9 groups").level is Level.OK
    assert check_sizing(with_info(maxmemory=0), 2 * GIB, "9 groups").level is Level.NOTE


def test_slow_forks_are_warned_of() -> None:
    assert check_fork(with_info(latest_fork_usec=2_000_000)).level is Level.WARNING
    assert check_fork(with_info(latest_fork_usec=20_000)).level is Level.OK
    assert check_fork(with_info(maxmemory=11 * GIB)).level is Level.WARNING
    assert check_fork(with_info(total_system_memory=0)).level is Level.NOTE


def test_a_slow_disk_is_warned_of() -> None:
    assert check_disk_writes(with_info(aof_delayed_fsync=10)).level is Level.WARNING
    assert check_disk_writes(with_info(aof_delayed_fsync=9)).level is Level.OK
    assert check_disk_writes(with_info(aof_last_write_status="err")).level is Level.ERROR


def test_a_full_disk_is_warned_of() -> None:
    assert check_disk_space(FACTS).level is Level.NOTE
    assert check_disk_space(replace(FACTS, space=Space(Path("/d"), True, 24 * GIB))).level is Level.OK
    assert check_disk_space(replace(FACTS, space=Space(Path("/d"), True, 24 * GIB - 1))).level is Level.WARNING


def test_an_open_server_is_an_error_unless_only_this_machine_reaches_it() -> None:
    def level(*, local: bool = True, bind: str = "*", protected: str = "no") -> Level:
        config = {"bind": bind, "protected-mode": protected}
        return check_access(replace(FACTS, open=True, local=local, config=config)).level

    assert level() is Level.ERROR
    assert level(local=False, protected="yes") is Level.ERROR
    assert level(protected="yes") is Level.NOTE
    assert level(bind="127.0.0.1 -::1") is Level.NOTE
    assert level(bind="127.0.0.1 10.0.0.1") is Level.ERROR
    assert check_access(replace(FACTS, open=True, local=True, config=None)).level is Level.NOTE
    assert check_access(replace(FACTS, open=None)).level is Level.NOTE
    assert "every role shares" in check_access(replace(FACTS, user="default")).message


def test_an_open_server_gets_users_and_no_password_in_an_argument() -> None:
    facts = replace(FACTS, open=True, cli="redis-cli -h 10.0.0.1 -p 6379", settings="'a b/rollq.toml'")
    finding = check_access(facts)
    assert finding.commands == (
        "rollq runs acl 'a b/rollq.toml' --passwords passwords > rollq.acl",
        'echo "aclfile $PWD/rollq.acl" >> /etc/valkey.conf',
        "redis-cli -h 10.0.0.1 -p 6379 shutdown",
    )
    assert "`rollq redis --acl rollq.acl`" in finding.message
    without_file = check_access(replace(facts, info={**FACTS.info, "config_file": ""}))
    assert without_file.commands == finding.commands[:1]


def test_unencrypted_connections_to_other_machines_are_warned_of() -> None:
    plain = replace(FACTS, address="redis://10.0.0.1:6379/0")
    finding = check_encryption(plain)
    assert (finding.level, finding.commands) == (
        Level.WARNING,
        ("export ROLLQ_REDIS_URL=rediss://10.0.0.1:6379/0",),
    )
    assert check_encryption(replace(plain, local=True)).level is Level.OK


def test_slow_and_stalling_servers_are_warned_of() -> None:
    assert check_latency(replace(FACTS, pings_s=(0.02,) * 20)).level is Level.WARNING
    assert check_latency(replace(FACTS, pings_s=(0.001,) * 19 + (1.5,))).level is Level.WARNING
    assert check_latency(replace(FACTS, pings_s=(0.001,) * 19 + (0.5,))).level is Level.OK


@pytest.mark.parametrize(("ahead_s", "words"), [(6.0, "6 s ahead of"), (-3600.0, "3600 s behind")])
def test_clocks_that_disagree_are_warned_of(ahead_s: float, words: str) -> None:
    finding = check_clock(replace(FACTS, clock_ahead_s=ahead_s))
    assert (finding.level, words in finding.message) == (Level.WARNING, True)


def test_the_way_of_the_weights_is_checked() -> None:
    room = Space(Path("/shared"), True, 10 * GIB)
    assert check_weights_folder(room, 10 * GIB).level is Level.OK
    assert check_weights_folder(room, 11 * GIB).level is Level.WARNING
    assert check_weights_folder(replace(room, writable=False), 0).level is Level.WARNING
    assert [check_weights_in_redis(size, 64).level for size in (0, 64, 65)] == [Level.NOTE, Level.OK, Level.ERROR]
