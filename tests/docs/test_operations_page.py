"""docs/guide/operations.md and when-it-breaks.md: commands run, the configuration is well, losses are as listed."""

import math
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from click.testing import CliRunner

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.common.ports import free_port
from rollq.buffer.errors import NotClaimed, ServerRefused, StoreLost
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.embedded_server import EmbeddedServer, embedded_binary
from rollq.buffer.store.keys import RunKeys
from rollq.buffer.store.library import library_name
from rollq.buffer.store.users import Role
from rollq.buffer.values.rollouts import MOST_PART_BYTES
from rollq.cli.main import main
from rollq.monitor.doctor import checks, sizing
from rollq.monitor.doctor.checks import BUFFER_CHECKS
from rollq.monitor.doctor.findings import EXIT_STATUS
from support.buffer_run import World
from support.configured_server import configured_server
from support.documented_commands import ROOT, Desk, blocks, files
from support.other_release import OtherRelease, OtherRole
from support.waiting import wait_until

SETUP, BREAKS = (ROOT / "docs" / "guide" / name for name in ("operations.md", "when-it-breaks.md"))
TEXT = SETUP.read_text("utf-8")


def command(words: str) -> str:
    """The block of commands of the pages that is `words`, or the first that contains them."""
    shown = [block.code for page in (SETUP, BREAKS) for block in blocks(page) if block.language == "bash"]
    matching = [code for code in shown if words in code]
    return next((code for code in matching if code.strip() == words), matching[0])


# -- runbooks ---------------------------------------------------------------------------------------------------------


BOTH_KINDS = pytest.mark.parametrize("binary", ["valkey", "redis"], indirect=True)


@pytest.fixture
def binary(request: pytest.FixtureRequest) -> Path:
    """A server program: the embedded Valkey or, in tests of both kinds, the system's Redis."""
    if getattr(request, "param", "valkey") == "valkey":
        return embedded_binary()
    redis_server: Path = request.getfixturevalue("redis_binary")
    return redis_server


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the settings of a run `sums`, and with its users, as the page's command makes them."""
    folder = tmp_path_factory.mktemp("users")
    (folder / "p.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    (folder / "rollq.toml").write_text(
        'run = "sums"\n[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 2\ngroup_size = 2\nlimits.max_tries = 1\n'
    )
    Desk(folder, 6379).run(command("rollq runs acl"))
    return folder


class Room:
    """A run `sums` on a server with users, and a spare server. The page's commands run as the administrator."""

    def __init__(self, folder: Path, server: EmbeddedServer, spare: EmbeddedServer) -> None:
        assert server.port is not None
        assert spare.port is not None
        self.server, self.spare = server, spare
        self.desk, self.spare_desk = Desk(folder, server.port), Desk(folder, spare.port)
        with self.admin() as client:
            client.config_set("maxmemory", "1gb")
            client.config_set("repl-diskless-sync-delay", 0)

    def run(self, words: str, *, succeeds: str = "") -> str:
        """Run the page's block with `words` against the server, with the spare one at 10.0.0.2."""
        code = command(words).replace("redis://10.0.0.2:6379/0", self.spare.url).rstrip()
        return self.desk.run(f"{command('REDISCLI_AUTH')}{code}{succeeds}")

    def run_on_spare(self, words: str) -> str:
        """Run the page's block with `words` against the spare server."""
        return self.spare_desk.run(f"{command('REDISCLI_AUTH')}{command(words).replace('10.0.0.2', '127.0.0.1')}")

    def password(self, user: str) -> str:
        return (self.desk.folder / "passwords" / user).read_text().strip()

    def admin(self, *, on_spare: bool = False) -> redis.Redis:
        """A client of the server, or of the spare one."""
        server = self.spare if on_spare else self.server
        return redis.Redis.from_url(server.url, username="sums-admin", password=self.password("admin"))

    @contextmanager
    def world(self, run: str = "sums", *, on_spare: bool = False) -> Iterator[World]:
        """The run, or its copy."""
        url = (self.spare if on_spare else self.server).url.replace("://", "://sums-admin@")
        with Buffer.connect(url, run, password=self.password("admin")) as buffer:
            yield World(buffer)


@pytest.fixture
def room(tmp_path: Path, users: Path, binary: Path, redis_cli: Path) -> Iterator[Room]:
    shutil.copytree(users, tmp_path, dirs_exist_ok=True)
    acl = tmp_path / "rollq.acl"
    with (
        EmbeddedServer(tmp_path / "server", binary=binary, acl=acl) as server,
        EmbeddedServer(tmp_path / "spare", binary=binary, acl=acl) as spare,
    ):
        room = Room(tmp_path, server, spare)
        with room.world() as world:
            world.start(math={"max_tries": 1})
            world.admit(1)
            world.buffer.hand_back(world.lease(1), counted=True, error="the judge raised")
            world.complete(4)
            world.train(1)
        yield room


def test_the_doctor_finds_nothing_wrong(room: Room) -> None:
    report = room.run("rollq doctor rollq.toml", succeeds=" || test $? -eq 3")
    assert "replication  a primary without replicas" in report
    assert "asks for a password; user sums-admin" in report
    room.run("health.json")
    report = orjson.loads((room.desk.folder / "health.json").read_bytes())
    ill = {finding["check"] for finding in report["findings"] if finding["level"] in ("warning", "error")}
    assert ill <= {"latency"}, "this machine may be busy"


@pytest.mark.long
@BOTH_KINDS
def test_the_limit_of_memory_is_raised(room: Room) -> None:
    assert "maxmemory_human:1.00G" in room.run("grep -E")
    room.run("config set maxmemory 16gb")
    assert "maxmemory_human:16.00G" in room.run("grep -E")


def test_the_commands_also_run_without_users(users: Path, fresh_server: EmbeddedServer, redis_cli: Path) -> None:
    assert fresh_server.port is not None
    url = f"export ROLLQ_REDIS_URL={fresh_server.url}\n"
    assert "16.0 GiB" in Desk(users, fresh_server.port).run(f"{url}{command('config set maxmemory 16gb')}")


@pytest.mark.long
@BOTH_KINDS
def test_a_lost_store_is_restored_and_a_backup_practised(room: Room) -> None:
    assert "saved 5 groups" in room.run("rollq snapshot save")
    assert "saved 5 groups" in room.run("rollq snapshot save"), "the older one is replaced"
    drill = room.run("--run drill")
    assert "restored 5 groups" in drill
    with room.world() as world:
        statuses = world.statuses()
        with room.world("drill", on_spare=True) as copy:
            assert copy.statuses() == statuses == {"completed": 2, "archived": 2, "failed": 1}
        assert "deleted run 'drill'" in room.run("runs delete drill")
        assert re.search(r"^sums +math +5 ", room.run("rollq runs list rollq.toml"), re.MULTILINE)
        world.buffer.client.flushall()
        with pytest.raises(StoreLost):
            world.admit(1)
    assert "now start the trainer from its checkpoint of step 1" in room.run("snapshot load rollq.toml")
    with room.world() as world:
        assert world.statuses() == statuses


def test_a_run_is_rewound_beside_the_old_one_whose_keys_are_removed(room: Room) -> None:
    room.run("rollq snapshot save")
    assert "run sums-rewound: " in room.run("ROLLQ_RUN=sums-rewound")
    with room.admin() as client:  # half a minute after its roles were stopped
        client.hset(RunKeys("sums").trainer, "deadline_ms", 1)
    assert "deleted run 'sums'" in room.run("runs delete rollq.toml sums")
    with room.world("sums-rewound") as world:
        assert world.statuses() == {"completed": 2, "archived": 2, "failed": 1}
        keys: list[Any] = world.buffer.client.keys("*")
    assert keys
    assert all(key.startswith(b"rollq:{sums-rewound") for key in keys)


def test_a_failed_group_is_inspected(room: Room) -> None:
    assert "the judge raised" in room.run('"status": "failed"')
    assert room.run("group:1' error").startswith("the judge raised\n")


@pytest.mark.long
def test_roles_are_upgraded_one_by_one(binary: Path, users: Path, tmp_path: Path, redis_cli: Path) -> None:
    shutil.copytree(users, tmp_path / "store")
    desk, old = Desk(tmp_path / "store", free_port("127.0.0.1")), OtherRelease(tmp_path / "old")
    settings, acl, url = desk.folder / "rollq.toml", desk.folder / "rollq.acl", f"redis://127.0.0.1:{desk.port}"
    config = files(SETUP)["server.conf"].replace("10.0.0.1", "127.0.0.1").replace("/etc/redis/rollq.acl", str(acl))
    (desk.folder / "server.conf").write_text(config.replace("8gb", "100mb"))
    acl.write_text(old.rollq("runs", "acl", settings, "--passwords", desk.folder / "passwords"))

    def password(role: Role) -> str:
        return (desk.folder / "passwords" / role).read_text().strip()

    def old_role(role: Role) -> AbstractContextManager[OtherRole]:
        return old.role(url.replace("://", f"://sums-{role}@"), "sums", password(role))

    def new_role(role: Role) -> Buffer:
        return Buffer.connect(url.replace("://", f"://sums-{role}@"), "sums", password=password(role))

    def as_admin(code: str) -> str:
        return desk.run(f"{command('REDISCLI_AUTH')}{code.replace('0123456789ab', old.digest)}")

    with configured_server(binary, desk.folder / "server.conf", desk.port):
        operator = {"ROLLQ_REDIS_USER": "sums-operator", "ROLLQ_REDIS_PASSWORD": password(Role.OPERATOR)}
        assert old.digest in old.rollq("doctor", "--load-functions", "--url", url, "--run", "sums", **operator)
        with old_role(Role.TRAINER) as trainer, old_role(Role.WORKER) as worker:
            with old_role(Role.PRODUCER) as producer:
                assert trainer("start") == producer("admit") == worker("lease") == ["done"]
            with pytest.raises(ServerRefused, match="run `rollq doctor --load-functions` as the operator"):
                new_role(Role.WORKER)
            assert library_name() in as_admin(command("--also"))
            with new_role(Role.PRODUCER) as buffer:
                World(buffer).admit(2)
            with new_role(Role.WORKER) as buffer:
                world = World(buffer)
                world.put(world.lease(2))
            assert trainer("train") == worker("put") == ["done"]
            report = as_admin("rollq doctor rollq.toml || test $? -eq 3\nrollq doctor rollq.toml --clean")
            assert f"{old.digest} (" in report
            assert report.endswith("found no unused functions\n")
        assert f"deleted the functions rollq_{old.digest}\n" in as_admin(command("--clean"))
        with new_role(Role.OPERATOR) as buffer:
            assert World(buffer).statuses() == {"completed": 2, "archived": 2}
    assert old.digest not in acl.read_text()


@BOTH_KINDS
def test_a_replica_takes_over(room: Room) -> None:
    lines = dict(line.split(" ", 1) for line in files(SETUP)["replica.conf"].splitlines())
    assert lines.keys() == {"replicaof", "masteruser", "masterauth"}
    with room.admin(on_spare=True) as replica:
        replica.config_set("masteruser", lines["masteruser"])
        replica.config_set("masterauth", room.password("replica"))
        replica.replicaof("127.0.0.1", room.server.port)
        wait_until(lambda: replica.info("replication")["master_link_status"] == "up")
    assert "role:master" in room.run_on_spare("replicaof no one")
    room.server.kill()
    assert "run sums: version 1" in room.run("ROLLQ_REDIS_URL=redis://10.0.0.2")
    (room.desk.folder / "trainer" / "checkpoints" / "step-00000040").mkdir(parents=True)
    room.run("set-aside")
    assert (room.desk.folder / "set-aside" / "step-00000040").is_dir()


# -- losses -----------------------------------------------------------------------------------------------------------


def test_without_the_file_a_killed_server_loses_the_run(fresh_server_of_each_kind: EmbeddedServer) -> None:
    server = fresh_server_of_each_kind
    with Buffer.connect(server.url, "sums") as buffer:
        world = World(buffer).start()
        world.complete(2)
        buffer.client.config_set("appendonly", "no")
        (server.directory / "appendonlydir").rename(server.directory / "no-file")
        server.kill()
        server.start()
        with pytest.raises(StoreLost):
            world.train(1)


def test_with_always_a_killed_server_loses_nothing(fresh_server_of_each_kind: EmbeddedServer) -> None:
    server = fresh_server_of_each_kind
    with Buffer.connect(server.url, "sums") as buffer:
        buffer.client.config_set("appendfsync", "always")
        world = World(buffer).start()
        for _ in range(20):
            world.complete(2)
        server.kill()
        server.start()
        assert world.statuses() == {"completed": 40}
        world.check()


@pytest.fixture
def behind(fresh_server_of_each_kind: EmbeddedServer, tmp_path: Path) -> Iterator[World]:
    """A run whose server has forgotten steps 2 and 3: a replica that was cut off after step 1 took over."""
    primary = fresh_server_of_each_kind
    with EmbeddedServer(tmp_path / "replica", binary=primary.binary) as other:
        with Buffer.connect(primary.url, "sums") as buffer, redis.Redis.from_url(other.url) as replica:
            world = World(buffer).start()
            world.complete(4)
            world.train(1)
            buffer.client.config_set("repl-diskless-sync-delay", 0)
            replica.replicaof("127.0.0.1", primary.port)
            wait_until(lambda: replica.get("rollq:{sums}:model_version") == b"1")
            replica.replicaof("NO", "ONE")
            world.complete(2)
            world.train(2)
            world.train(3)
            held = world.held
            world.admit(2)
            leases = world.lease(2)
        primary.kill()
        with Buffer.connect(other.url, "sums") as buffer:
            world = World(buffer)
            world.held = held
            assert world.put(leases) == [PutOutcome.REFUSED] * 2
            yield world
            world.check()


def test_a_trainer_whose_steps_were_forgotten_stops(behind: World) -> None:
    with pytest.raises(NotClaimed, match="cannot be committed: the last committed step is 1"):
        behind.buffer.commit(behind.held, 4)


def test_a_newer_checkpoint_continues_and_the_forgotten_prompts_are_sampled_again(behind: World) -> None:
    behind.begin(3, launch_id="launch-2")
    cursor = behind.buffer.counts("math").progress["cursor"]
    assert cursor == 4, "six prompts were admitted before the failover"
    behind.complete(2)
    behind.train(4)


def test_a_checkpoint_that_the_server_knows_gets_its_batch_again(behind: World) -> None:
    behind.begin(0, launch_id="launch-2")
    assert [group.group_id for group in behind.claim(1).groups] == [1, 2]


def test_a_trainer_continues_on_a_new_store(fresh_server_of_each_kind: EmbeddedServer) -> None:
    with Buffer.connect(fresh_server_of_each_kind.url, "sums") as buffer:
        buffer.create_run()
        buffer.register_task("math", TaskRules(batch_groups=2, group_size=2))
        world = World(buffer)
        world.begin(20, launch_id="launch-2")
        world.complete(2)
        world.train(21)
        world.check()


# -- words ------------------------------------------------------------------------------------------------------------


@BOTH_KINDS
def test_the_configuration_of_the_page_is_well(
    binary: Path, users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "LONGEST_MEDIAN_S", math.inf)
    monkeypatch.setattr(checks, "LONGEST_PING_S", math.inf)
    config, port = tmp_path / "server.conf", free_port("127.0.0.1")
    lines = files(SETUP)["server.conf"].replace("10.0.0.1", "127.0.0.1").replace("8gb", "100mb")
    config.write_text(lines.replace("/etc/redis/rollq.acl", str(users / "rollq.acl")))
    login = {"ROLLQ_REDIS_USER": "sums-admin", "ROLLQ_REDIS_PASSWORD_FILE": str(users / "passwords" / "admin")}
    with configured_server(binary, config, port):
        password = (users / "passwords" / "admin").read_text().strip()
        with Buffer.connect(f"redis://sums-admin@127.0.0.1:{port}", "sums", password=password) as buffer:
            buffer.create_run()
        place = ["--url", f"redis://127.0.0.1:{port}", "--run", "sums"]
        result = CliRunner().invoke(main, ["doctor", *place], env=login)
    assert result.exit_code == 0, result.output


def test_the_page_has_every_check_and_exit_status() -> None:
    table = TEXT.split("| check |")[1].split("\n\n")[0]
    named = {name.strip() for row in table.splitlines()[2:] for name in row.split("|")[1].split(",")}
    code = (ROOT / "monitor" / "rollq" / "monitor" / "doctor" / "checks.py").read_text()
    assert named == set(re.findall(r'_finding\("([\w ]+)"', code))
    assert len(BUFFER_CHECKS) + 4 == len(named)  # sizing, payloads, weights, and on a cluster replicas
    statuses = TEXT.split("| exit status |")[1].split("\n\n")[0]
    assert {int(status) for status in re.findall(r"^\| (\d)", statuses, re.M)} == {2, *EXIT_STATUS.values()}


def test_the_formula_on_the_page_is_the_one_that_is_used() -> None:
    formula = TEXT.split("## Memory\n")[1].split("```")[1]
    group = f"{sizing.PAYLOAD_FACTOR} x payload + {sizing.GROUP_BYTES / 1000} kB"
    assert f"{sizing.HEADROOM} x (groups x ({group})" in formula
    assert f"scheduled x ({sizing.PAYLOAD_FACTOR} x parts + {sizing.TICKET_BYTES // 1000} kB)" in formula
    assert f"{sizing.PARTS_FACTOR} x payload with partial_rollout, at most {MOST_PART_BYTES >> 20} MiB" in formula
    assert f"{sizing.SAMPLE_BYTES} B)" in formula


def test_the_messages_on_the_page_are_those_of_rollq() -> None:
    sources = "".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text("utf-8"))
        for pattern in ("*.py", "*.lua")
        for path in (ROOT / "buffer").rglob(pattern)
    ) + (ROOT / "producer" / "rollq" / "producer" / "strategy.py").read_text("utf-8")
    text = BREAKS.read_text("utf-8")
    quoted = [" ".join(quote.split()) for quote in re.findall(r"`([a-z][^`\n]*?\n?[^`\n]*?\.\.\.%?)`", text)]
    assert len(quoted) == 3
    assert [quote for quote in quoted if quote.rstrip(".%") not in sources] == []
