"""The checks on real servers: each is brought from well to ill, or back."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from rollq.buffer.common.ports import free_port
from rollq.buffer.store.connection import Patience, open_client
from rollq.buffer.store.embedded_server import EmbeddedServer, embedded_binary
from rollq.monitor.doctor.checks import BUFFER_CHECKS, QUEUE_CHECKS
from rollq.monitor.doctor.examine import examine_server
from rollq.monitor.doctor.facts import read_facts
from rollq.monitor.doctor.findings import Finding, Level
from support.configured_server import configured_server
from support.waiting import wait_until

Doctor = Callable[[], dict[str, Finding]]


@pytest.fixture
def client(fresh_server_of_each_kind: EmbeddedServer) -> redis.Redis:
    return redis.Redis.from_url(fresh_server_of_each_kind.url, decode_responses=True)


def findings(url: str, password: str | None = None) -> dict[str, Finding]:
    with open_client(url, password) as client:
        facts, found = examine_server(client, BUFFER_CHECKS)
    assert facts is not None, found
    return {finding.check: finding for finding in found}


@pytest.fixture
def doctor(fresh_server_of_each_kind: EmbeddedServer) -> Doctor:
    return lambda: findings(fresh_server_of_each_kind.url)


def test_the_embedded_server_only_lacks_a_limit_of_its_memory(doctor: Doctor) -> None:
    found = doctor()
    assert {name for name, finding in found.items() if finding.level is Level.WARNING} <= {"memory", "latency"}
    assert not [finding for finding in found.values() if finding.level is Level.ERROR]
    assert {name for name, finding in found.items() if finding.level is Level.NOTE} == {"access"}


@pytest.mark.parametrize(
    ("check", "settings", "level"),
    [
        ("eviction", {"maxmemory-policy": "allkeys-lru"}, Level.ERROR),
        ("memory", {"maxmemory": "100mb"}, Level.OK),
        ("memory", {"maxmemory": "1mb"}, Level.ERROR),
        ("fork", {"maxmemory": 10**15}, Level.WARNING),
        ("disk space", {"maxmemory": 10**15}, Level.WARNING),
        ("persistence", {"appendfsync": "always"}, Level.OK),
        ("persistence", {"appendfsync": "no"}, Level.WARNING),
        ("persistence", {"appendonly": "no"}, Level.ERROR),
        ("persistence", {"appendonly": "no", "save": "60 1"}, Level.WARNING),
        ("access", {"bind": "0.0.0.0", "protected-mode": "no"}, Level.ERROR),
    ],
)
def test_a_setting_is_found(
    doctor: Doctor, client: redis.Redis, check: str, settings: dict[str, Any], level: Level
) -> None:
    before = doctor()[check]
    for name, value in settings.items():
        client.config_set(name, value)
    after = doctor()[check]
    assert after.level is level
    assert after.message != before.message


@pytest.mark.parametrize("settings", [{"maxmemory-policy": "allkeys-lru"}, {"appendonly": "no"}, {"maxmemory": "1mb"}])
def test_the_command_of_an_error_mends_it(
    doctor: Doctor, client: redis.Redis, settings: dict[str, str], redis_cli: Path
) -> None:
    for name, value in settings.items():
        client.config_set(name, value)
    (ill,) = [finding for finding in doctor().values() if finding.level is Level.ERROR]
    for command in ill.commands:
        subprocess.run(command.replace("redis-cli", str(redis_cli), 1), shell=True, check=True, capture_output=True)
    assert doctor()[ill.check].level is Level.OK


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_the_commands_give_an_open_server_users(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, redis_cli: Path
) -> None:
    binary = embedded_binary() if kind == "valkey" else request.getfixturevalue("redis_binary")
    settings, config, port = tmp_path / "a b.toml", tmp_path / "server.conf", free_port("127.0.0.1")
    settings.write_text('run = "r"\n[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 1\n')
    config.write_text("bind 0.0.0.0\nprotected-mode no\nappendonly yes\n")
    with configured_server(binary, config, port) as server:
        with open_client(f"redis://127.0.0.1:{port}") as client:
            found = examine_server(client, BUFFER_CHECKS, settings=settings)[1]
        (ill,) = [finding for finding in found if finding.level is Level.ERROR]
        assert ill.check == "access"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        for command in ill.commands:
            subprocess.run(command, shell=True, check=True, capture_output=True, cwd=tmp_path, env={"PATH": path})
        assert server.wait(30) == 0
    with configured_server(binary, config, port):
        well = findings(f"redis://r-admin@127.0.0.1:{port}", (tmp_path / "passwords" / "admin").read_text().strip())
    assert (well["access"].level, well["access"].message) == (Level.OK, "asks for a password; user r-admin")


def test_a_password_closes_the_server(fresh_server_of_each_kind: EmbeddedServer, client: redis.Redis) -> None:
    url = fresh_server_of_each_kind.url
    assert findings(url)["access"].level is Level.NOTE
    client.config_set("requirepass", "planted-secret")
    found = findings(url, "planted-secret")
    assert found["access"].level is Level.OK
    assert "user default, which every role shares" in found["access"].message
    assert "planted-secret" not in repr(found)


def test_a_server_behind_a_socket_is_well(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "s", unix_socket=True) as server:
        found = findings(server.url)
    assert (found["access"].level, found["encryption"].level) == (Level.OK, Level.OK)


def test_a_snapshot_that_fails_is_found(
    doctor: Doctor, client: redis.Redis, fresh_server_of_each_kind: EmbeddedServer
) -> None:
    assert doctor()["disk writes"].level is Level.OK
    (fresh_server_of_each_kind.directory / "dump.rdb" / "not-empty").mkdir(parents=True)
    client.bgsave()
    wait_until(lambda: doctor()["disk writes"].level is Level.ERROR)


def test_a_pause_of_the_server_is_found(doctor: Doctor, client: redis.Redis) -> None:
    client.client_pause(1500)
    finding = doctor()["latency"]
    assert (finding.level, "stalled" in finding.message) == (Level.WARNING, True)


def test_clocks_are_compared(fresh_server_of_each_kind: EmbeddedServer) -> None:
    with open_client(fresh_server_of_each_kind.url) as client:
        assert abs(read_facts(client, Patience()).clock_ahead_s) < 5
        assert read_facts(client, Patience(), lambda: time.time() + 3600).clock_ahead_s < -3590


def test_replicas_are_found(
    doctor: Doctor, client: redis.Redis, fresh_server_of_each_kind: EmbeddedServer, tmp_path: Path
) -> None:
    server = fresh_server_of_each_kind
    assert doctor()["replication"].message == "a primary without replicas"
    client.config_set("repl-diskless-sync-delay", 0)
    with EmbeddedServer(tmp_path / "replica", binary=server.binary) as other:
        with redis.Redis.from_url(other.url) as replica:
            replica.replicaof("127.0.0.1", server.port)
            wait_until(lambda: client.info("replication")["connected_slaves"] == 1)
        refused = findings(other.url)["replication"]
        assert refused.level is Level.ERROR
        assert refused.commands == (f"export ROLLQ_REDIS_URL=redis://127.0.0.1:{server.port}/0",)
        assert doctor()["replication"].level is Level.WARNING
        client.config_set("min-replicas-to-write", 1)
        assert doctor()["replication"].level is Level.OK


def with_options(binary: Path, script: Path, options: str) -> Path:
    """A program at `script` that runs the server `binary` with further options."""
    script.write_text(f'#!/bin/sh\nexec {binary} "$@" {options}\n')
    script.chmod(0o755)
    return script


def without(command: str, script: Path) -> Path:
    """A server at `script` that lacks `command`, as managed ones lack CONFIG, and others FUNCTION."""
    return with_options(embedded_binary(), script, f"--rename-command {command} ''")


def test_tls_is_noticed(tmp_path: Path, openssl: Path, redis_binary: Path) -> None:
    key, certificate, port = tmp_path / "key.pem", tmp_path / "certificate.pem", free_port("127.0.0.1")
    new = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {key} -out {certificate}"
    names = "-addext subjectAltName=IP:127.0.0.1"
    subprocess.run([openssl, *new.split(), *names.split()], check=True, capture_output=True)
    tls = f"--tls-port {port} --tls-cert-file {certificate} --tls-key-file {key} --tls-auth-clients no"
    with EmbeddedServer(tmp_path / "s", binary=with_options(redis_binary, tmp_path / "program", tls)) as server:
        assert findings(server.url)["encryption"].message != "TLS"
        found = findings(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}")
    assert (found["encryption"].message, found["access"].level) == ("TLS", Level.NOTE)
    command = f"redis-cli -h 127.0.0.1 -p {port} --tls --cacert {certificate} config set maxmemory "
    assert found["memory"].commands[0].startswith(command)


def test_a_server_without_functions_is_an_error(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "s", binary=without("FUNCTION", tmp_path / "program")) as server:
        finding = findings(server.url)["server"]
        assert finding.level is Level.ERROR
        assert re.match(r"valkey [\d.]+ has no functions", finding.message)
        with open_client(server.url) as client:
            assert examine_server(client, QUEUE_CHECKS)[1][0].level is Level.OK


def test_what_a_managed_server_hides_is_a_note(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "s", binary=without("CONFIG", tmp_path / "program")) as server:
        found = findings(server.url)
    notes = {name: finding.message for name, finding in found.items() if finding.level is Level.NOTE}
    assert notes.keys() == {"persistence", "disk space", "access"}
    assert all("could not be read" in message for message in notes.values())


def test_what_a_user_may_not_read_is_a_note(fresh_server: EmbeddedServer) -> None:
    with redis.Redis.from_url(fresh_server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+info", "+ping", "+time")
    found = findings(fresh_server.url.replace("redis://", "redis://reader:secret@"))
    assert found["server"].level is Level.OK
    assert found["persistence"].message == "append-only file on; appendfsync could not be read"


def test_a_server_that_is_not_there_is_one_error(fresh_server: EmbeddedServer) -> None:
    fresh_server.stop()
    with open_client(fresh_server.url) as client:
        facts, (finding,) = examine_server(client, BUFFER_CHECKS, Patience(unanswered_s=0))
    assert facts is None
    assert (finding.level, "start it, or correct the URL" in finding.message) == (Level.ERROR, True)
