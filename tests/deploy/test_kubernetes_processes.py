"""The pods of deploy/kubernetes as processes: all roles of a run, with a password, and with users and TLS."""

import shutil
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollq.buffer.store.embedded_server import embedded_binary
from rollq.cli.main import main
from support.certificates import make_certificates
from support.compose_file import COMPOSE, swapped
from support.free_ports import free_ports
from support.kustomize import KUBERNETES, built
from support.pods import Pods

PASSWORD = "correct-horse-battery-staple"
ROLES = ("producer", "worker", "trainer", "metrics", "dashboard")
USERS = {"metrics": "monitor", "dashboard": "monitor"} | {
    role: role for role in ("producer", "worker", "trainer", "operator")
}


@pytest.fixture
def volumes(prepared_demo: Path, tmp_path: Path) -> dict[str, Path]:
    """The folders of the volumes, with settings for a CPU and the demo's model."""
    found = {name: tmp_path / "volumes" / name for name in ("rollq", "rollq-data", "rollq-output")}
    shutil.copytree(prepared_demo, found["rollq-data"])
    for name in ("rollq", "rollq-output"):
        found[name].mkdir()
    text = (COMPOSE / "rollq-cpu.toml").read_text("utf-8").replace('run = "demo"', 'run = "my-run"')
    here = {"/data": str(found["rollq-data"]), "/output": str(found["rollq-output"])}
    (found["rollq"] / "rollq.toml").write_text(swapped(text, here), "utf-8")
    return found


def test_a_port_is_replaced_as_a_whole_and_once() -> None:
    here = {"9464": "29464", "6379": "19464", "store:6379": "127.0.0.1:19464"}
    assert swapped("--port 9464 --redis store:6379 19464", here) == "--port 29464 --redis 127.0.0.1:19464 19464"


def rollq(*words: str | Path) -> str:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def make_secrets(folder: Path, settings: Path) -> dict[str, Path]:
    """The Secrets that docs/guide/kubernetes.md makes, by name."""
    acl = rollq("runs", "acl", settings, "--passwords", folder / "passwords")
    make_certificates(folder / "certificates", "rollq-store")
    found = {}
    for user in {*USERS.values(), "server"}:
        secret = found[f"rollq-{user}"] = folder / f"rollq-{user}"
        secret.mkdir()
        for name, source in {"ca.crt": "ca.crt", "tls.crt": f"{user}.crt", "tls.key": f"{user}.key"}.items():
            shutil.copy(folder / "certificates" / source, secret / name)
        if user != "server":
            shutil.copy(folder / "passwords" / user, secret / "password")
    (found["rollq-server"] / "rollq.acl").write_text(acl)
    return found


def begun(port: int) -> bool:
    """Whether the metrics show groups, a worker and a trainer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    return all(
        word in text for word in ("rollq_up{", "rollq_admitted_groups_total", "rollq_worker_groups{", "rollq_epoch{")
    )


def play(pods: Pods) -> None:
    """Start the roles, wait until all have begun, and stop them."""
    assert not pods.passes("producer", "readinessProbe"), "nobody has created the run"
    for role in ROLES:
        pods.start(role)
    pods.wait_until(lambda: pods.passes("metrics", "livenessProbe") and begun(pods.ports[9464]))
    pods.wait_until(lambda: pods.passes("dashboard", "livenessProbe"))
    for role in ROLES:
        assert pods.passes(role, "readinessProbe")
    assert pods.passes("store", "livenessProbe")
    assert [pods.stop(role) for role in (*ROLES, "store")] == [0] * 6
    assert not pods.passes("store", "livenessProbe")
    assert not pods.passes("producer", "readinessProbe")


@pytest.mark.slow  # the same roles start from the compose file
def test_the_pods_of_the_base_start_become_ready_and_stop_cleanly(
    tmp_path: Path, volumes: dict[str, Path], redis_cli: Path
) -> None:
    secret = tmp_path / "rollq-store"
    secret.mkdir()
    (secret / "password").write_text(PASSWORD + "\n")
    store = free_ports(3)
    programs = {"valkey-server": embedded_binary(), "valkey-cli": redis_cli}
    manifests = built(KUBERNETES / "base")
    ports = {6379: store, 9464: store + 1, 8484: store + 2}
    with Pods(tmp_path, manifests, {**volumes, "rollq-store": secret}, ports, programs) as pods:
        assert not pods.passes("store", "readinessProbe")
        pods.start("store")
        pods.wait_until(lambda: pods.passes("store", "readinessProbe"))
        play(pods)


@pytest.mark.slow  # users and TLS of all roles are in tests/docs/test_security_page.py
def test_with_users_and_tls_they_do_the_same(
    tmp_path: Path, volumes: dict[str, Path], redis_cli: Path, redis_binary: Path, openssl: Path
) -> None:
    secrets = make_secrets(tmp_path, volumes["rollq"] / "rollq.toml")
    store = free_ports(3)
    programs = {"valkey-server": redis_binary, "valkey-cli": redis_cli}
    manifests = built(KUBERNETES / "overlays" / "secure")
    ports = {6379: store, 9464: store + 1, 8484: store + 2}
    with Pods(tmp_path, manifests, {**volumes, **secrets}, ports, programs) as pods:
        pods.start("store")
        pods.wait_until(lambda: pods.passes("store", "readinessProbe"))
        pods.start("functions")
        assert pods.processes.pop("functions").wait() == 0, pods.log("functions").read_text()
        play(pods)
