"""docs/guide/security.md: its commands run, as users, with TLS; the roles train; no password shows anywhere."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.store.connection import connect
from rollq.buffer.store.redis_url import complete_url
from rollq.buffer.store.users import Role, functions_of
from rollq.monitor.records import METRICS_FILE
from support.documented_commands import ROOT, Desk, blocks, steps_trained

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
    return re.sub(r"^.*CERTIFICATE_FILE.*\n", "", code, flags=re.MULTILINE)


def refusals(url: str) -> set[str]:
    """The commands that the server has refused to users, less one that the driver sends with every connection."""
    with connect(url, password="admin") as admin:
        log: Any = admin.execute_command("ACL", "LOG")
    entries = [dict(zip(entry[::2], entry[1::2], strict=True)) if isinstance(entry, list) else entry for entry in log]
    return {str(entry.get(b"object", entry.get("object"))) for entry in entries} - {"b'client|setinfo'"}


@pytest.mark.parametrize("tls", [True, False], ids=["redis with TLS", "valkey without"])
def test_the_roles_of_the_page_train_as_users(
    desk: Desk, sums: Path, request: pytest.FixtureRequest, openssl: Path, tls: bool
) -> None:
    binary = str(request.getfixturevalue("redis_binary")) if tls else ""
    plain = [block.code for block in blocks(PAGE) if block.mark == "" and block.language == "bash"]
    terminals = {block.detail: block.code for block in blocks(PAGE) if block.mark == "terminal"}
    assert set(terminals) == {"store", *COPIED}
    if not tls:
        terminals = {role: without_tls(code) for role, code in terminals.items()}
    shown = "".join(map(desk.run, plain))
    with (desk.folder / "rollq.acl").open("a") as acl:
        acl.write("user admin on >admin ~* &* +@all\n")
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
        as_operator = f"cd operator\n{terminals['operator'].rpartition('rollq load-functions')[0]}"
        shown += desk.run(f"{as_operator}rollq pause sums/rollq.toml\nrollq resume sums/rollq.toml")
        shown += desk.run(f"{as_operator}rollq checkpoint saved sums/rollq.toml")
        shown += desk.run(f"{as_operator}rollq status sums/rollq.toml\nrollq rq-info sums/rollq.toml")
        arguments = processes()
        scheme, files = ("rediss", tls_files(desk.folder / "certificates")) if tls else ("redis", (None, None, None))
        url = complete_url(f"{scheme}://127.0.0.1:{desk.port}", "admin", *files)
        assert refusals(url) == set()
    shown += "".join(path.read_text() for path in desk.folder.glob("*.log"))
    assert "run demo: weights version" in shown
    for password in secrets_of(desk.folder / "passwords"):
        assert len(password) == 64
        assert password.decode() not in shown
        assert not [path for path, line in arguments.items() if password in line]
        assert password not in (desk.folder / "redis" / "server.log").read_bytes()


def tls_files(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "ca.crt", folder / "operator.crt", folder / "operator.key"


def test_the_page_describes_every_user() -> None:
    text = PAGE.read_text("utf-8")
    assert [role for role in Role if f"\n| {role.value} |" not in text] == []
    assert {"lease", "put", "renew"} <= functions_of(Role.WORKER)
    assert {"claim", "commit", "run_publish", "rewind", "checkpoint"} <= functions_of(Role.TRAINER)
    assert {"admit", "recycle", "set_control"} <= functions_of(Role.PRODUCER)
