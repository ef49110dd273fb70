"""docs/guide/security.md: its commands run, as users, with TLS; the roles train; no password shows anywhere."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from rollq.buffer.store.connection import connect
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.redis_url import complete_url
from rollq.buffer.store.users import Role, ServerUser, functions_of
from rollq.cli.main import main
from rollq.monitor.report.records import METRICS_FILE
from support.certificates import make_certificates
from support.documented_commands import ROOT, Desk, blocks, steps_trained
from support.waiting import wait_until

PAGE = ROOT / "docs" / "guide" / "security.md"
COPIED = {"operator", "producer", "worker", "trainer"}


def give(desk: Desk, role: str) -> None:
    """Copy to a role's machine what it needs, and nothing else."""
    machine = desk.folder / role
    for name in ("certificates/ca.crt", f"certificates/{role}.crt", f"certificates/{role}.key", f"passwords/{role}"):
        (machine / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(desk.folder / name, machine / name)
    shutil.copytree(desk.folder / "sums", machine / "sums")


def secrets_of(folder: Path) -> list[bytes]:
    return [path.read_bytes().strip() for path in folder.iterdir()]


def processes() -> "dict[str, bytes]":
    """The arguments of every process on this machine."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found[str(path)] = path.read_bytes()
        except OSError:
            continue
    return found


def without_tls(code: str) -> str:
    """The page's commands for the server inside rollq, which has no TLS."""
    code = code.replace(" --certificates certificates --program /usr/bin/redis-server", "").replace("rediss:", "redis:")
    code = code.replace(" ROLLQ_REDIS_CA_FILE=certificates/ca.crt", "")
    code = re.sub(r" \\\n  --tls( --\w+ certificates/\S+)+", "", code)
    return re.sub(r"^.*CERTIFICATE_FILE.*\n", "", code, flags=re.MULTILINE)


def refusals(log: str) -> set[str]:
    """The commands that the server has refused to users, less one that the driver sends with every connection."""
    lines = log.splitlines()
    return {lines[at + 1].strip() for at, line in enumerate(lines) if line == "object"} - {"client|setinfo"}


@pytest.mark.long
@pytest.mark.parametrize(
    "tls", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["redis with TLS", "valkey without"]
)
def test_the_roles_of_the_page_train_as_users(
    desk: Desk, sums: Path, request: pytest.FixtureRequest, openssl: Path, redis_cli: Path, tls: bool
) -> None:
    binary = str(request.getfixturevalue("redis_binary")) if tls else ""
    plain = [block.code for block in blocks(PAGE) if block.mark == "" and block.language == "bash"]
    terminals = {block.detail: block.code for block in blocks(PAGE) if block.mark == "terminal"}
    (refused,) = [block.code for block in blocks(PAGE) if block.mark == "redis-cli"]
    assert set(terminals) == {"store", *COPIED}
    if not tls:
        refused, terminals = without_tls(refused), {role: without_tls(code) for role, code in terminals.items()}
    shown = "".join(map(desk.run, plain))
    for role in COPIED:
        give(desk, role)
    metrics = desk.folder / "trainer" / "sums" / "trainer" / METRICS_FILE
    with desk:
        desk.open("store", terminals.pop("store").replace("/usr/bin/redis-server", binary))
        desk.wait_until(lambda: b"serving at" in desk.log("store").read_bytes())
        assert "the server has the functions" in desk.run(f"cd operator\n{terminals['operator']}")
        for role in ("producer", "worker", "trainer"):
            desk.open(role, terminals[role], role)
        desk.wait_until(lambda: steps_trained(metrics) >= 2)
        as_operator = f"cd operator\n{terminals['operator'].rpartition('rollq doctor ')[0]}"
        shown += desk.run(f"{as_operator}rollq pause sums/rollq.toml\nrollq resume sums/rollq.toml")
        shown += desk.run(f"{as_operator}rollq snapshot save sums/rollq.toml saved")
        shown += desk.run(f"{as_operator}rollq status sums/rollq.toml")
        arguments = processes()
        assert refusals(desk.run(refused)) == set()
    shown += "".join(path.read_text() for path in desk.folder.glob("*.log"))
    assert "\nrun demo: version " in shown
    for password in secrets_of(desk.folder / "passwords"):
        assert len(password) == 64
        assert password.decode() not in shown
        assert not [path for path, line in arguments.items() if password in line]
        assert password not in (desk.folder / "redis" / "server.log").read_bytes()


def test_refusals_are_those_of_the_administrators_log(fresh_server: EmbeddedServer, redis_cli: Path) -> None:
    with connect(fresh_server.url) as client:
        client.execute_command("ACL", "SETUSER", "poor", "on", ">poor", "+ping")
    with (
        redis.Redis.from_url(fresh_server.url, username="poor", password="poor") as poor,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        poor.get("key")
    log = subprocess.check_output([redis_cli, "-p", str(fresh_server.port), "acl", "log"], text=True)
    assert refusals(log) == {"get"}


def test_a_replica_follows_with_tls(tmp_path: Path, sums: Path, redis_binary: Path, openssl: Path) -> None:
    rollq = CliRunner().invoke
    acl, certificates, passwords = (tmp_path / name for name in ("rollq.acl", "certificates", "passwords"))
    acl.write_text(rollq(main, ["runs", "acl", str(sums / "rollq.toml"), "--passwords", str(passwords)]).stdout)
    make_certificates(certificates)

    def admin(server: EmbeddedServer) -> redis.Redis:
        files = (certificates / name for name in ("ca.crt", "admin.crt", "admin.key"))
        return connect(complete_url(server.url, "demo-admin", *files), (passwords / "admin").read_text().strip())

    with (
        EmbeddedServer(tmp_path / "s", binary=redis_binary, acl=acl, certificates=certificates) as server,
        EmbeddedServer(tmp_path / "r", binary=redis_binary, acl=acl, certificates=certificates) as other,
        admin(server) as primary,
        admin(other) as replica,
    ):
        primary.config_set("repl-diskless-sync-delay", 0)
        replica.config_set("tls-replication", "yes")
        replica.config_set("masteruser", "demo-replica")
        replica.config_set("masterauth", (passwords / "replica").read_text().strip())
        replica.replicaof("127.0.0.1", server.port)
        wait_until(lambda: replica.info("replication")["master_link_status"] == "up")


def test_the_page_describes_every_user() -> None:
    text = PAGE.read_text("utf-8")
    assert [role for role in Role if f"\n| {role.value} |" not in text] == []
    assert [user for user in ServerUser if f"`demo-{user.value}`" not in text] == []
    assert {"lease", "put", "renew"} <= functions_of(Role.WORKER)
    assert {"claim", "commit", "run_publish", "rewind", "checkpoint"} <= functions_of(Role.TRAINER)
    assert {"admit", "recycle", "set_control"} <= functions_of(Role.PRODUCER)
