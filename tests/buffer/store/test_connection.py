import logging
import os
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from redis._parsers.base import BaseParser

from rollq.buffer.buffer import Buffer
from rollq.buffer.common.ports import free_port
from rollq.buffer.errors import ConfigError, RollqError, ServerError, ServerRefused, ServerUnavailable
from rollq.buffer.store.connection import Patience, connect, open_client, patiently, unfit
from rollq.buffer.store.embedded_server import EmbeddedServer, embedded_binary
from rollq.buffer.store.redis_errors import diagnose, reply_text
from rollq.buffer.store.redis_url import address, check_url, cli_command, has_password, mask_url
from support.any_server import AnyServer
from support.power_cut import kill_synced
from support.proxy import Proxy

AT_ONCE = Patience(unanswered_s=0, unready_s=0)


@pytest.mark.plain_server
def test_connect_returns_a_client_that_keeps_bytes(any_server: AnyServer, run_name: str) -> None:
    with connect(any_server.url) as client:
        client.set(run_name, b"\xff\x00")
        assert client.get(run_name) == b"\xff\x00"


# --- URLs


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:secret@localhost", "redis://***@localhost"),
        ("rediss://user:secret@localhost", "rediss://***@localhost"),
        ("redis://:se@cr/e?t#@localhost", "redis://***@localhost"),
        ("redis://:sec\nret@localhost", "redis://***@localhost"),
        ("user:secret@localhost", "***@localhost"),
        ("redis:/user:secret@localhost", "***@localhost"),
        ("unix:///run/s.sock?db=0&password=secret&x=1", "unix:///run/s.sock?db=0&password=***&x=1"),
        ("rediss://h?ssl_password=secret", "rediss://h?ssl_password=***"),
    ],
)
def test_masked_urls_hold_no_secret(url: str, shown: str) -> None:
    assert mask_url(url) == shown


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("redis://localhost:6379/0", False),
        ("rediss://user@localhost:6379?ssl_ca_certs=/me@here/ca.crt", False),
        ("unix:///run/s.sock?db=0", False),
        ("redis://:@localhost", False),
        ("redis://:secret@localhost", True),
        ("rediss://user:secret@localhost", True),
        ("redis://:se@cr/e?t#@localhost", True),
        ("user:secret@localhost", True),
        ("unix:///run/s.sock?db=0&password=secret", True),
        ("rediss://h?ssl_keyfile=/k&ssl_password=secret", True),
        ("rediss://h?password=", False),
    ],
)
def test_a_password_in_a_url_is_found(url: str, found: bool) -> None:
    assert has_password(url) is found


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "must begin with redis://"),
        ("localhost:6379", "must begin with redis://"),
        ("http://localhost", "must begin with redis://"),
        ("redis://", "needs a host"),
        ("redis://host:0", "needs a host and a port"),
        ("redis://host:99999", "the port must be 1 to 65535"),
        ("redis://host:port", "the port must be 1 to 65535"),
        ("redis://:se/cret@host", r"'redis://\*\*\*@host': the port"),
        ("redis://[::1", "the port must be"),
        ("redis://host/zero", "number of a database"),
        ("unix://relative/path", "needs an absolute path"),
    ],
)
def test_urls_that_name_no_server_are_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_url(url)


@pytest.mark.parametrize("option", ["no_such_option=planted", "socket_timeout=planted", "db=planted"])
def test_url_options_that_the_driver_does_not_know_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="has an option that is unknown or of the wrong type"):
        open_client(f"redis://localhost?{option}")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:p@example.org", "redis://example.org:6379/0"),
        ("rediss://[::1]:7000/3", "rediss://[::1]:7000/3"),
        ("unix:///a%20b/s.sock?db=2", "unix:///a%20b/s.sock?db=2"),
    ],
)
def test_a_client_tells_its_address_without_its_login(url: str, shown: str) -> None:
    with open_client(url) as client:
        assert address(client) == shown


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("redis://localhost:7000", "redis-cli -h localhost -p 7000 ping"),
        ("rediss://u:p@example.org", "redis-cli -h example.org -p 6379 --tls --user u --askpass ping"),
        ("rediss://h?ssl_ca_certs=/c&ssl_keyfile=/k", "redis-cli -h h -p 6379 --tls --cacert /c --key /k ping"),
        ("unix:///s.sock?password=p", "redis-cli -s /s.sock --askpass ping"),
    ],
)
def test_remedies_reach_the_same_server(url: str, command: str) -> None:
    with open_client(url) as client:
        assert cli_command(client, "ping") == command


def with_options(binary: Path, script: Path, *options: str) -> Path:
    """A program at `script` that runs the server `binary` with further options."""
    script.write_text(f'#!/bin/sh\nexec {binary} "$@" {" ".join(options)}\n')
    script.chmod(0o755)
    return script


def test_tls_is_checked_and_used(tmp_path: Path, openssl: Path, redis_binary: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    files = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run([openssl, *new, *names, *files], check=True, capture_output=True)
    port = free_port("127.0.0.1")
    tls = f"--tls-port {port} --tls-cert-file {certificate} --tls-key-file {key} --tls-auth-clients no"
    with EmbeddedServer(tmp_path / "s", binary=with_options(redis_binary, tmp_path / "tls-server", tls)):
        with connect(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}") as client:
            assert client.ping()
        with pytest.raises(ServerUnavailable, match=rf"^rediss://127\.0\.0\.1:{port}/0: .*certificate verify failed"):
            connect(f"rediss://127.0.0.1:{port}")


# --- servers that do not serve


def test_nobody_at_the_url_is_said_with_the_remedy(fresh_server: EmbeddedServer) -> None:
    fresh_server.stop()
    with pytest.raises(ServerUnavailable, match=rf"^{fresh_server.url}: .*refused.* - start it, or correct the URL"):
        connect(fresh_server.url)


def test_nobody_at_the_socket_is_said(tmp_path: Path) -> None:
    with pytest.raises(ServerUnavailable, match=r"nobody\.sock"):
        connect(f"unix://{tmp_path}/nobody.sock")


def test_a_host_without_address_is_said() -> None:
    with pytest.raises(ServerUnavailable, match=r"redis://no-such-host\.invalid:6379/0"):
        connect("redis://no-such-host.invalid")


@pytest.fixture
def locked_server(tmp_path: Path) -> "EmbeddedServer":
    return EmbeddedServer(tmp_path / "locked", password="right")


@pytest.mark.parametrize("password", [None, "planted-wrong"])
def test_a_wrong_password_is_refused_and_does_not_leak(
    locked_server: EmbeddedServer, password: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with locked_server, pytest.raises(ServerRefused, match="set the right password in ROLLQ_REDIS_PASSWORD") as caught:
        connect(locked_server.url, password)
    assert "ROLLQ_REDIS_USER" in str(caught.value)
    assert "in the URL" not in str(caught.value)
    assert "planted" not in "".join(traceback.format_exception(caught.value)) + caplog.text


def test_a_password_that_the_server_does_not_ask_for_is_refused(server_url: str) -> None:
    with pytest.raises(ServerRefused, match="ROLLQ_REDIS_PASSWORD"):
        connect(server_url, "planted")


def test_a_password_in_the_url_wins_over_the_argument(locked_server: EmbeddedServer) -> None:
    with locked_server, connect(locked_server.url.replace("://", "://:right@"), "wrong") as client:
        assert "right" not in repr(client) + address(client)


def test_an_evicting_server_is_refused_with_the_command_that_mends_it(fresh_server: EmbeddedServer) -> None:
    with connect(fresh_server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(ServerRefused, match="maxmemory-policy is 'allkeys-lru'") as caught:
            connect(fresh_server.url)
        remedy = f"`redis-cli -h 127.0.0.1 -p {fresh_server.port} config set maxmemory-policy noeviction`"
        assert remedy in str(caught.value)


def test_a_role_without_admin_rights_connects_when_it_may_look(fresh_server: EmbeddedServer) -> None:
    with connect(fresh_server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "worker", "on", ">pass", "~*", "+ping", "+info", "+get")
        url = fresh_server.url.replace("://", "://worker:pass@")
        with connect(url) as client:
            assert client.get("key") is None
            with pytest.raises(ServerRefused, match=r"no permissions.* - use the user of the role that runs"):
                patiently(client, lambda: client.set("key", 1))
        admin.execute_command("ACL", "SETUSER", "worker", "-info")
        with pytest.raises(ServerRefused, match="'info' command"):
            connect(url)


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({"redis_version": "7.0.15"}, ""),
        ({"redis_version": "10.0"}, ""),
        ({"redis_version": "6.2.14"}, "it is redis 6.2.14"),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, ""),
        ({"redis_version": "7.2.4", "valkey_version": "7.1.0"}, "it is valkey 7.1.0"),
        (
            {"redis_version": "7.4.0", "cluster_enabled": 1},
            "it is a node of a cluster; name two or more of its nodes, as in redis://a:7000,b:7000/0",
        ),
        ({}, "it is redis of unknown version"),
    ],
)
def test_servers_too_old_or_clustered_are_unfit(info: dict[str, object], why: str) -> None:
    assert unfit(info) == why


# --- what errors mean


def reply_error(reply: str) -> redis.RedisError:
    """What the driver makes of an error reply."""
    error: redis.RedisError = BaseParser.parse_error(reply)  # type: ignore[no-untyped-call]
    return error


@pytest.mark.parametrize(
    ("reply", "error", "passes"),
    [
        ("LOADING Redis is loading the dataset in memory", ServerUnavailable, True),
        ("BUSY Redis is busy running a script.", ServerUnavailable, True),
        ("MASTERDOWN Link with MASTER is down", ServerUnavailable, True),
        ("CLUSTERDOWN The cluster is down", ServerUnavailable, True),
        ("TRYAGAIN Multiple keys request during rehashing of slot", ServerUnavailable, True),
        (
            "ERR Attempted to access a non local key in a cluster node script: on @user_function:499.",
            ServerUnavailable,
            True,
        ),
        ("ERR Script attempted to access a non local key in a cluster node", ServerUnavailable, True),
        ("READONLY You can't write against a read only replica.", ServerRefused, True),
        ("NOREPLICAS Not enough good replicas to write.", ServerUnavailable, True),
        ("MISCONF Errors writing to the AOF file: No space left on device", ServerRefused, True),
        ("ERR max number of clients reached", ServerUnavailable, True),
        ("OOM command not allowed when used memory > 'maxmemory'.", ServerRefused, False),
        ("NOAUTH Authentication required.", ServerRefused, False),
        ("WRONGPASS invalid username-password pair or user is disabled.", ServerRefused, False),
        ("NOPERM User x has no permissions to run the 'set' command", ServerRefused, False),
        ("MOVED 3999 127.0.0.1:6381", ServerUnavailable, True),
        ("CROSSSLOT Keys in request don't hash to the same slot", ServerRefused, False),
        ("DENIED Redis is running in protected mode", ServerRefused, False),
    ],
)
def test_replies_about_the_server_are_understood(reply: str, error: type[ServerError], passes: bool) -> None:
    trouble = diagnose(reply_error(reply))
    assert trouble is not None
    assert (trouble.error, trouble.passes) == (error, passes)


@pytest.mark.parametrize("reply", ["ROLLQ_FENCED epoch 3 is over", "WRONGTYPE Operation against a key", "EXECABORT x"])
def test_replies_about_a_command_pass_through(server_url: str, reply: str) -> None:
    def fail() -> None:
        raise reply_error(reply)

    with open_client(server_url) as client, pytest.raises(redis.ResponseError, match=reply.split()[-1]):
        patiently(client, fail)


def test_errors_in_a_pipeline_are_understood_like_others(fresh_server: EmbeddedServer) -> None:
    with connect(fresh_server.url) as client:
        client.config_set("min-replicas-to-write", 1)
        with client.pipeline(transaction=False) as pipe:
            pipe.set("key (of", "value) of")
            with pytest.raises(redis.ResponseError) as caught:
                pipe.execute()
    assert reply_text(caught.value) == "NOREPLICAS Not enough good replicas to write."
    assert diagnose(caught.value) is not None


# --- patience


@pytest.mark.parametrize("command", [b"PING", b"INFO", b"STATS", b"LIST"])
def test_a_connection_that_breaks_while_a_role_connects_is_opened_again(
    server: EmbeddedServer, run_name: str, command: bytes
) -> None:
    assert server.port is not None
    with Proxy(server.port) as proxy:
        proxy.cut_at(command, times=3)  # the driver itself tries twice
        with Buffer.connect(proxy.url, run_name) as buffer:
            buffer.create_run()
        assert proxy.cuts == 3


def test_a_server_that_loads_its_data_is_waited_for(tmp_path: Path) -> None:
    slow = "--key-load-delay 50 --loading-process-events-interval-bytes 1024"
    server = EmbeddedServer(tmp_path / "s", binary=with_options(embedded_binary(), tmp_path / "slow-server", slow))
    with server, connect(server.url) as client:
        with client.pipeline(transaction=False) as pipe:
            for number in range(20_000):
                pipe.set(f"key:{number}", "x" * 100)
            pipe.execute()
        kill_synced(server, client)
        starting = threading.Thread(target=server.start)
        starting.start()
        with pytest.raises(redis.BusyLoadingError):
            wait_for_loading(client)
        with connect(server.url) as other:
            assert other.dbsize() == 20_000
        starting.join()


def wait_for_loading(client: redis.Redis) -> None:
    """Send PING until it is answered; raises what the server says while it loads."""
    while True:
        try:
            client.ping()
        except redis.BusyLoadingError:
            raise
        except redis.ConnectionError:
            continue
        return


def set_key(client: redis.Redis) -> Callable[[], object]:
    return lambda: client.set("key", "value")


def test_an_outage_is_waited_out_with_one_log_line(
    fresh_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(fresh_server.url) as client:
        fresh_server.kill()
        back = threading.Timer(0.5, fresh_server.start)
        back.start()
        assert patiently(client, set_key(client)) is True
        back.join()
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"{fresh_server.url}: " in warning.message
    assert "waiting up to 60 s for it" in warning.message


def test_a_restart_between_two_commands_goes_unnoticed(
    fresh_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(fresh_server.url) as client:
        client.set("key", "value")
        kill_synced(fresh_server, client)
        fresh_server.start()
        assert patiently(client, lambda: client.get("key")) == b"value"
    assert caplog.text == ""


def test_a_failover_is_waited_out(fresh_server: EmbeddedServer, server: EmbeddedServer) -> None:
    with connect(fresh_server.url) as client, connect(fresh_server.url) as admin:
        admin.replicaof("127.0.0.1", str(server.port))
        with pytest.raises(ServerRefused, match="read-only replica: give the URL of the primary"):
            patiently(client, set_key(client), AT_ONCE)
        promotion = threading.Timer(0.3, lambda: admin.replicaof("NO", "ONE"))
        promotion.start()
        assert patiently(client, set_key(client)) is True
        promotion.join()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ResponseError:
        return False


def test_a_busy_server_is_waited_out(fresh_server: EmbeddedServer) -> None:
    def loop_until_killed() -> None:
        with connect(fresh_server.url) as other, pytest.raises(redis.ResponseError, match="killed"):
            other.eval("while true do end", 0)

    def kill_script() -> None:
        with open_client(fresh_server.url) as admin:
            admin.script_kill()

    with connect(fresh_server.url) as client:
        client.config_set("busy-reply-threshold", 1)
        looping, killing = threading.Thread(target=loop_until_killed), threading.Timer(0.5, kill_script)
        looping.start()
        while answers(client):
            pass
        killing.start()
        assert patiently(client, set_key(client)) is True
        looping.join()
        killing.join()


def test_a_full_server_is_an_error_at_once(fresh_server: EmbeddedServer) -> None:
    with connect(fresh_server.url) as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(ServerRefused, match="memory is full: raise maxmemory"):
            patiently(client, set_key(client))


def test_patience_ends_when_its_owner_closes(fresh_server: EmbeddedServer) -> None:
    patience = Patience()
    with connect(fresh_server.url) as client:
        fresh_server.stop()
        closing = threading.Timer(0.2, patience.closed.set)
        closing.start()
        with pytest.raises(ServerUnavailable):
            patiently(client, set_key(client), patience)
        closing.join()


def test_a_stalled_server_is_no_hang(fresh_server: EmbeddedServer) -> None:
    assert fresh_server.pid is not None
    with open_client(f"{fresh_server.url}?socket_timeout=0.2") as client:
        client.ping()
        os.kill(fresh_server.pid, signal.SIGSTOP)
        with pytest.raises(ServerUnavailable, match="Timeout"):
            patiently(client, set_key(client), AT_ONCE)
        os.kill(fresh_server.pid, signal.SIGCONT)


def test_server_errors_are_rollqs_own_and_chain_the_drivers(fresh_server: EmbeddedServer) -> None:
    with connect(fresh_server.url) as client:
        fresh_server.stop()
        with pytest.raises(RollqError) as caught:
            patiently(client, set_key(client), AT_ONCE)
    assert isinstance(caught.value.__cause__, redis.ConnectionError)


@pytest.mark.plain_server
def test_a_database_that_the_server_does_not_have_is_refused_by_its_number(any_server: AnyServer) -> None:
    url = f"{any_server.url.rpartition('/')[0]}/99"
    with pytest.raises(ConfigError, match="the server has no database 99; name one that it has, such as /0"):
        connect(url)
