"""The embedded cluster with users and TLS."""

import subprocess
import sys
from pathlib import Path

import pytest
import redis

from rollq.buffer.buffer import Buffer
from rollq.buffer.common.memory import usable_memory
from rollq.buffer.errors import ServerUnavailable
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.embedded_cluster import EmbeddedCluster
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.redis_url import complete_url
from rollq.buffer.store.users import USERS, Role, ServerUser, acl_lines, password_digest, user_name
from support.certificates import make_certificates
from support.free_ports import free_ports


def port_of(buffer: Buffer) -> int:
    """The port of the primary that has the task."""
    client = buffer.servers.of(task_keys(buffer.run, "math").clock)
    return int(client.connection_pool.connection_kwargs["port"])


@pytest.mark.long
def test_a_cluster_has_users_speaks_tls_and_starts_again(redis_binary: Path, openssl: Path, tmp_path: Path) -> None:
    certificates, acl, first = tmp_path / "certificates", tmp_path / "rollq.acl", free_ports(6)
    make_certificates(certificates)
    files = (certificates / "ca.crt", certificates / "worker.crt", certificates / "worker.key")
    acl.write_text("\n".join(acl_lines("sums", {user: password_digest(user.value) for user in USERS})) + "\n")

    def cluster() -> EmbeddedCluster:
        return EmbeddedCluster(
            tmp_path / "cluster",
            port=first,
            binary=redis_binary,
            acl=acl,
            certificates=certificates,
            node_timeout_ms=1000,
        )

    def connect(url: str, user: Role | ServerUser) -> Buffer:
        return Buffer.connect(complete_url(url, user_name("sums", user), *files), "sums", password=user.value)

    with cluster() as started:
        assert started.url.startswith("rediss://")
        with connect(started.url, ServerUser.ADMIN) as buffer:
            buffer.create_run()
            buffer.register_task("math", TaskRules(batch_groups=2))
        with connect(started.url, Role.WORKER) as buffer:
            before = port_of(buffer)
            started.nodes[before - first].kill()
            assert buffer.counts("math").clock.committed == 0
            assert port_of(buffer) != before
        stranger = complete_url(started.url, user_name("sums", Role.WORKER), files[0], None, None)
        with pytest.raises(ServerUnavailable):  # no certificate of ours
            Buffer.connect(stranger, "sums", password="worker")
    with cluster() as again, connect(again.url, Role.WORKER) as buffer:
        assert buffer.tasks() == ["math"]


def test_nodes_of_one_machine_share_its_memory(tmp_path: Path) -> None:
    first = free_ports(6)
    command = [sys.executable, "-m", "rollq.cli.main", "redis", "--dir", str(tmp_path), "--cluster", "3"]
    with subprocess.Popen([*command, "--port", str(first)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline().startswith("serving at ")
        shares = []
        for port in range(first, first + 6):
            with redis.Redis(port=port) as node:
                shares.append(int(node.config_get("maxmemory")["maxmemory"]))
        process.terminate()
    assert len(set(shares)) == 1
    assert 0 < sum(shares) <= usable_memory() // 2
