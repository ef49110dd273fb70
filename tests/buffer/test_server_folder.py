"""Large payloads in the folder of an embedded server, which roles on its machine use without a setting."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rq import Queue

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.errors import ConfigError
from rollq.buffer.payloads.folders_and_buckets import Folder
from rollq.buffer.payloads.object_payloads import MARKER
from rollq.buffer.payloads.router import MIN_BYTES, SERVER_FOLDER, SERVER_FOLDER_MIN_BYTES
from rollq.buffer.rules.settings import PayloadSettings
from rollq.buffer.store import server_folder
from rollq.buffer.store.connection import connect
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.tickets import open_queue
from rollq.buffer.values.rollouts import GroupResult
from rollq.buffer.wire.group_fields import MOST_INLINE_BYTES
from support.buffer_run import World, make_sample
from support.waiting import wait_until

LARGE = "x" * 3000
FROM_2000_BYTES = PayloadSettings(min_bytes=2000)


@pytest.fixture
def world(fresh_server: EmbeddedServer, run_name: str) -> Iterator[World]:
    with Buffer.connect(fresh_server.url, run_name, payloads=FROM_2000_BYTES) as buffer:
        yield World(buffer)


def put(world: World, text: str = LARGE) -> None:
    world.admit(1)
    (lease,) = world.lease(1)
    sample = make_sample(0, text=text)
    assert world.buffer.put([GroupResult(lease, (sample,) * len(lease.samples))]) == [PutOutcome.COMPLETED]


def files_of(server: EmbeddedServer, run: str) -> list[Path]:
    """The payloads of a run in the folder of the server."""
    files = (server.directory / server_folder.NAME / run).rglob("*")
    return sorted(path for path in files if path.is_file() and path.name != MARKER)


def place_of(buffer: Buffer) -> str:
    place: bytes = buffer.send("HGET", buffer.keys.info, "payloads")
    return place.decode()


def test_the_setting_names_both_of_its_defaults() -> None:
    described = PayloadSettings.model_fields["min_bytes"].description
    assert described is not None
    assert described.endswith(
        f"default: {MIN_BYTES >> 20} MiB, and {SERVER_FOLDER_MIN_BYTES >> 10} KiB in the folder of an embedded server"
    )


def test_large_groups_are_in_the_folder_and_outlive_a_killed_server(world: World, fresh_server: EmbeddedServer) -> None:
    world.start()
    put(world, "small")
    put(world)
    (payload,) = files_of(fresh_server, world.buffer.run)
    assert payload.stat().st_size > len(LARGE)
    fresh_server.kill()
    fresh_server.start()
    with Buffer.connect(fresh_server.url, world.buffer.run) as later:
        claimed = World(later)
        claimed.held = world.held
        groups = claimed.claim(1).groups
        assert [group.samples[0].text for group in later.fetch(groups)] == ["small", LARGE]
    assert [group.samples[0].text for group in world.buffer.fetch(groups)] == ["small", LARGE]
    world.check()


def test_payloads_are_brought_to_disk_by_themselves_and_when_the_buffer_closes(
    world: World, fresh_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start()
    synced: list[Path] = []
    real = os.fsync

    def fsync(number: int) -> None:
        real(number)
        synced.append(Path(f"/proc/self/fd/{number}").resolve())

    monkeypatch.setattr(os, "fsync", fsync)
    put(world)
    (first,) = files_of(fresh_server, world.buffer.run)
    folders = list(first.parents[:4])
    assert folders[-1] == fresh_server.directory / server_folder.NAME
    wait_until(lambda: first in synced and synced[synced.index(first) :] == [first, *folders])
    put(world)
    (second,) = set(files_of(fresh_server, world.buffer.run)) - {first}
    world.buffer.close()
    assert synced[-5:] == [second, *folders], "the folder of a run that was deleted may be new"


USED_IN_A_PROCESS = """
import gc, os, sys, time
from rollq.buffer.payloads.folders_and_buckets import Folder

real, synced = os.fsync, []
def fsync(number):
    real(number)
    synced.append(number)
    print(os.readlink(f"/proc/self/fd/{number}"), flush=True)
os.fsync = fsync
folder = Folder(sys.argv[1], fsync="everysec")
folder.put("task/first", b"payload")
while len(synced) < 3:  # the file and two folders; the next sync is a second later
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    "use",
    [
        "folder.put('task/last', b'payload')",
        "folder.put('task/last', b'payload')\ndel folder\ngc.collect()",
        "if os.fork() == 0:\n    folder.put('task/last', b'payload')\nelse:\n    os.wait()",
        "folder.close()\nfolder.put('task/last', b'payload')",
    ],
    ids=["ended", "collected", "forked", "closed"],
)
def test_the_last_file_is_brought_to_disk(use: str, tmp_path: Path) -> None:
    script = [sys.executable, "-W", "ignore", "-c", USED_IN_A_PROCESS + use, str(tmp_path)]
    ran = subprocess.run(script, capture_output=True, text=True, check=True, timeout=60)
    assert str(tmp_path / "task/last") in ran.stdout.splitlines()
    assert ran.stderr == ""


def test_a_payload_that_was_removed_before_it_was_on_disk_is_no_trouble(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Folder(str(tmp_path), fsync="everysec")
    for name in ("run/task/1", "run/task/2"):
        folder.put(name, b"payload")
    folder.remove("run/task/1")
    folder.close()
    assert not caplog.records
    assert folder.get("run/task/2") == b"payload"


def test_a_disk_that_fails_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    folder = Folder(str(tmp_path), fsync="everysec")
    folder.put("run/task/1", b"payload")
    folder.put("run/task/2", b"payload")
    folder.close()
    (record,) = caplog.records
    assert "may not be on disk: [Errno 5] Input/output error" in record.message


def test_by_default_only_large_frames_go_there(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        world = World(buffer).start()
        put(world, "x" * (SERVER_FOLDER_MIN_BYTES // 4))
        assert files_of(fresh_server, run_name) == []
        put(world, "x" * SERVER_FOLDER_MIN_BYTES)
        assert len(files_of(fresh_server, run_name)) == 1


@pytest.mark.parametrize("kind", ["reachable", "acl"])
def test_a_server_that_other_machines_or_users_reach_has_no_folder(kind: str, tmp_path: Path, run_name: str) -> None:
    acl = tmp_path / "acl"
    acl.write_text("user default on nopass ~* &* +@all\n")
    options = {"bind": "0.0.0.0", "password": "secret"} if kind == "reachable" else {"acl": acl}
    with EmbeddedServer(tmp_path / "server", **options) as server:
        with Buffer.connect(server.url, run_name, password=server.password, payloads=FROM_2000_BYTES) as buffer:
            put(World(buffer).start())
            assert place_of(buffer) == ""
        assert not (server.directory / server_folder.NAME).exists()


def test_the_folder_of_another_server_at_the_same_path_is_not_used(fresh_server: EmbeddedServer, run_name: str) -> None:
    server_folder.mark(fresh_server.directory, "0" * 40)  # as on a machine that reaches this server by a tunnel
    with Buffer.connect(fresh_server.url, run_name, payloads=FROM_2000_BYTES) as buffer:
        put(World(buffer).start())
        assert place_of(buffer) == ""
    assert files_of(fresh_server, run_name) == []


def test_a_role_that_cannot_use_the_folder_is_refused(world: World, fresh_server: EmbeddedServer) -> None:
    world.start()
    server_folder.mark(fresh_server.directory, "0" * 40)
    with (
        Buffer.connect(fresh_server.url, world.buffer.run) as buffer,
        pytest.raises(ConfigError, match=r"in the folder of its embedded server, .* or set payloads\.url"),
    ):
        buffer.create_run()
    mounted = PayloadSettings(url=str(fresh_server.directory / server_folder.NAME))
    with Buffer.connect(fresh_server.url, world.buffer.run, payloads=mounted) as buffer:
        buffer.create_run()


def test_payloads_leave_the_room_that_the_server_needs_for_its_own_files(
    world: World, fresh_server: EmbeddedServer
) -> None:
    free = shutil.disk_usage(fresh_server.directory).free
    with connect(fresh_server.url) as client:
        client.config_set("maxmemory", free // server_folder.FILES_FACTOR + (1 << 30))
    world.start()
    with Buffer.connect(fresh_server.url, world.buffer.run, payloads=FROM_2000_BYTES) as buffer:
        later = World(buffer)
        later.held = world.held
        put(later, "x" * MOST_INLINE_BYTES)
        assert files_of(fresh_server, world.buffer.run) == []
        assert place_of(buffer) == SERVER_FOLDER
        assert len(buffer.fetch(later.claim(1, math=1).groups)[0].samples[0].text) == MOST_INLINE_BYTES
    world.check()


def test_the_default_user_may_be_named_in_the_url(tmp_path: Path, run_name: str) -> None:
    with EmbeddedServer(tmp_path / "server", password="secret") as server:
        url = server.url.replace("://", "://default:secret@")
        with Buffer.connect(url, run_name) as buffer:
            assert buffer.payloads.place == SERVER_FOLDER


def test_after_a_failover_the_folder_of_the_first_server_can_be_named(
    world: World, fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    put(world.start())
    first_folder = fresh_server.directory / server_folder.NAME
    with EmbeddedServer(tmp_path / "replica") as replica:
        with connect(replica.url) as client:
            client.replicaof("127.0.0.1", str(fresh_server.port))
            wait_until(lambda: client.info("replication").get("master_link_status") == "up")
            client.replicaof("NO", "ONE")
        with (
            Buffer.connect(replica.url, world.buffer.run) as buffer,
            pytest.raises(ConfigError, match=r"or set payloads\.url"),
        ):
            buffer.check_payloads()
        with Buffer.connect(replica.url, world.buffer.run, payloads=PayloadSettings(url=str(first_folder))) as buffer:
            buffer.check_payloads()
            after = World(buffer)
            after.held = world.held
            assert [group.samples[0].text for group in buffer.fetch(after.claim(1, math=1).groups)] == [LARGE]


def test_a_role_leaves_the_folder_if_another_one_created_the_run_without_it(
    world: World, fresh_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server_folder, "find", lambda *_: None)
        with Buffer.connect(fresh_server.url, world.buffer.run) as blind:
            blind.create_run()
    assert world.buffer.payloads.place == SERVER_FOLDER
    put(world.start())
    assert files_of(fresh_server, world.buffer.run) == []
    world.check()


def test_a_run_that_is_deleted_leaves_nothing_in_the_folder(world: World, fresh_server: EmbeddedServer) -> None:
    put(world.start())
    queue: Queue = open_queue(fresh_server.url, world.buffer.run)
    with Buffer.connect(fresh_server.url, world.buffer.run) as operator:
        operator.delete_run(queue, force=True)
    names = [path.name for path in (fresh_server.directory / server_folder.NAME).iterdir()]
    assert names == [server_folder.MARK]


def test_a_snapshot_goes_to_a_server_with_a_folder_and_to_one_without(
    world: World, fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    put(world.start(), "x" * MOST_INLINE_BYTES)
    world.buffer.save(tmp_path / "saved")
    with (
        EmbeddedServer(tmp_path / "elsewhere", bind="0.0.0.0", password="secret") as server,
        Buffer.connect(server.url, "copy", password="secret") as buffer,
    ):
        buffer.restore(tmp_path / "saved")
        assert place_of(buffer) == ""
    with Buffer.connect(fresh_server.url, "copy", payloads=FROM_2000_BYTES) as buffer:
        buffer.restore(tmp_path / "saved")
        assert place_of(buffer) == SERVER_FOLDER
        assert len(files_of(fresh_server, "copy")) == 1


@pytest.mark.parametrize("kind", ["url", "unix", "ipv6"])
def test_the_folder_is_found_however_the_server_is_reached(kind: str, tmp_path: Path, run_name: str) -> None:
    options = {"unix": {"unix_socket": True}, "ipv6": {"bind": "::1"}, "url": {}}[kind]
    with (
        EmbeddedServer(tmp_path / "a b ü", **options) as server,  # type: ignore[arg-type]
        Buffer.connect(server.url.replace("127.0.0.1", "localhost"), run_name) as buffer,
    ):
        assert buffer.payloads.place == SERVER_FOLDER


def test_a_user_of_an_acl_is_not_asked_for_rights_that_it_lacks(fresh_server: EmbeddedServer, run_name: str) -> None:
    with connect(fresh_server.url) as client:
        client.execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all", "-config")
        with Buffer.connect(fresh_server.url.replace("://", "://limited:secret@"), run_name) as buffer:
            put(World(buffer).start())
            assert place_of(buffer) == ""
        assert client.acl_log() == []
