import re
import shlex
import shutil
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from rollq.buffer.buffer import Buffer
from rollq.buffer.common.ports import free_port
from rollq.buffer.errors import StoreLost
from rollq.cli.demo.command import demo
from rollq.cli.main import main
from rollq.cli.run_location import RunLocation
from support.certificates import make_certificates
from support.compose_file import COMPOSE, PASSWORD, Containers, read_compose
from support.free_ports import free_ports

SERVICES = read_compose({})["services"]
NODES = [name for name, service in SERVICES.items() if "NODE" in service.get("environment", {})]
SIMULATED = '[worker]\nengine = "simulated"'
FAKE_GPUS = "#!/bin/sh\nprintf '0\\n1\\n'\n"


@pytest.fixture
def volume(prepared_demo: Path, tmp_path: Path) -> Path:
    """The volume `demo` as `prepare-cpu` fills it."""
    return shutil.copytree(prepared_demo, tmp_path / "demo")


@pytest.mark.long
def test_prepare_cpu_makes_a_demo_where_there_is_none(tmp_path: Path, volume: Path) -> None:
    words = shlex.split(SERVICES["prepare-cpu"]["command"][-1])
    assert words[:6] == ["test", "-e", "/data/rollq.toml", "||", "rollq", "demo"]
    made = demo.make_context("rollq demo", words[6:]).params
    assert (made["prepare"], made["out"]) == (True, Path("/data"))

    before = (volume / "rollq.toml").stat()
    with Containers(tmp_path, free_port("127.0.0.1"), {}, {"demo": volume}) as world:
        world.start("prepare-cpu")
        assert world.finish("prepare-cpu") == 0, world.log("prepare-cpu").read_text()
    assert (volume / "rollq.toml").stat() == before


def answers(world: Containers) -> bool:
    try:
        with redis.Redis(port=world.port, password=PASSWORD, socket_connect_timeout=1) as client:
            return client.ping() is True
    except redis.RedisError:
        return False


def all_have_begun(buffer: Buffer) -> bool:
    """Whether the producer has admitted prompts, a worker has reported, and the trainer has opened an epoch."""
    try:
        counts = buffer.counts("sum")
    except StoreLost:  # no role has created the run yet
        return False
    return counts.clock.epoch > 0 and counts.progress["admitted"] > 0 and len(buffer.workers()) > 0


@pytest.mark.long
@pytest.mark.parametrize("profile", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_the_services_of_a_profile_start_and_stop_cleanly(profile: str, volume: Path, tmp_path: Path) -> None:
    suffix = {"cpu": "-cpu", "gpu": ""}[profile]
    config = (COMPOSE / "rollq-cpu.toml").read_text("utf-8")
    if profile == "gpu":  # an engine that needs no GPU, and no torch
        config = re.sub(r"\[worker\.options\]\n(\w.*\n)+", "", config.replace("[worker]", SIMULATED))
        config = config.replace("[trainer]", "[trainer]\nmax_mismatch = 1000.0")  # its logprobs are of no model
        config += '[archive]\nurl = "/archive"\n'
    (tmp_path / "rollq.toml").write_text(config, "utf-8")
    variables = {"ROLLQ_DATA": str(volume), "ROLLQ_CONFIG": str(tmp_path / "rollq.toml")}
    with Containers(tmp_path, free_port("127.0.0.1"), variables, {"demo": volume}) as world:
        (world.programs / "nvidia-smi").write_text(FAKE_GPUS)
        (world.programs / "nvidia-smi").chmod(0o755)
        world.start("redis")
        world.wait_until(lambda: answers(world))
        roles = [role + suffix for role in ("producer", "worker", "trainer")]
        roles += ["archiver"] if profile == "gpu" else []
        assert not world.healthy(roles[0])
        for role in roles:
            world.start(role)
        with RunLocation.at(f"redis://:{PASSWORD}@127.0.0.1:{world.port}/0", "demo").buffer() as buffer:
            world.wait_until(lambda: all_have_begun(buffer))
        assert all(world.healthy(role) for role in roles)
        assert PASSWORD not in "".join(world.log(role).read_text() for role in roles)
        assert {world.stop(role) for role in [*roles, "redis"]} == {0}
        assert not world.healthy(roles[0])
        if profile == "gpu":
            logs = "".join(world.log(role).read_text() for role in roles)
            assert sorted(re.findall(r"rollq gets GPU (\d+)", logs)) == ["0", "1"]


@pytest.mark.slow  # users and TLS of all roles are in tests/docs/test_security_page.py
def test_with_users_and_tls_the_services_do_the_same(
    volume: Path, tmp_path: Path, redis_binary: Path, redis_cli: Path, openssl: Path
) -> None:
    secrets = make_secrets(tmp_path / "secrets")
    with Containers(tmp_path, free_port("127.0.0.1"), {}, {"demo": volume}, secrets=secrets) as world:
        (world.programs / "valkey-cli").symlink_to(redis_cli)
        (world.programs / "valkey-server").unlink()
        (world.programs / "valkey-server").symlink_to(redis_binary)
        world.start("redis")
        world.wait_until(lambda: world.healthy("redis"))
        world.start("functions")
        assert world.finish("functions") == 0, world.log("functions").read_text()
        del world.processes["functions"]
        roles = ["producer-cpu", "worker-cpu", "trainer-cpu"]
        for role in roles:
            world.start(role)
        world.wait_until(lambda: "step 1" in world.log("trainer-cpu").read_text())
        assert all(world.healthy(role) for role in roles)
        assert [world.stop(role) for role in [*roles, "redis"]] == [0, 0, 0, 0]
        logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
        assert not [path for path in (secrets / "passwords").iterdir() if path.read_text().strip() in logs]


def make_secrets(folder: Path) -> Path:
    """The folder compose/secrets, made by the commands at the head of secure.yaml."""
    commands = re.findall(r"^#   rollq (.*)$", (COMPOSE / "secure.yaml").read_text("utf-8"), flags=re.MULTILINE)
    folder.mkdir()
    make_certificates(folder / "certificates", "redis")
    for command in commands:
        text = command.replace("compose/secrets", str(folder)).replace("compose/rollq", str(COMPOSE / "rollq"))
        words, _, target = text.partition(" > ")
        result = CliRunner().invoke(main, shlex.split(words))
        assert result.exit_code == 0, result.output
        if target:
            Path(target).write_text(result.stdout)
    return folder


def test_the_store_wants_the_password_and_survives_a_kill(tmp_path: Path, redis_cli: Path) -> None:
    with Containers(tmp_path, free_port("127.0.0.1"), {}) as world:
        (world.programs / "valkey-cli").symlink_to(redis_cli)
        assert not world.healthy("redis")
        world.start("redis")
        world.wait_until(lambda: world.healthy("redis"))
        with redis.Redis(port=world.port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with redis.Redis(port=world.port, password=PASSWORD) as client:
            client.set("kept", "yes")
            client.waitaof(1, 0, 0)
            assert client.config_get("maxmemory*")["maxmemory-policy"] == "noeviction"
        world.processes["redis"].kill()
        world.processes["redis"].wait()
        world.start("redis")
        world.wait_until(lambda: world.healthy("redis"))
        with redis.Redis(port=world.port, password=PASSWORD) as client:
            assert client.get("kept") == b"yes"
        assert PASSWORD.encode() not in Path(f"/proc/{world.processes['redis'].pid}/cmdline").read_bytes()


@pytest.mark.slow  # a run on a cluster is in tests/docs/test_cluster_page.py
def test_the_nodes_become_a_cluster_that_a_run_can_use(tmp_path: Path, redis_cli: Path) -> None:
    first = free_ports(len(NODES))
    variables = {"ROLLQ_REDIS_MEMORY": "100mb"}
    with Containers(tmp_path, free_port("127.0.0.1"), variables, nodes=range(first, first + len(NODES))) as world:
        (world.programs / "valkey-cli").symlink_to(redis_cli)
        for _ in range(2):  # the second time, the nodes are a cluster already
            for node in NODES:
                world.start(node)
            world.wait_until(lambda: all(map(world.healthy, NODES)))
            world.start("cluster-create")
            assert world.finish("cluster-create") == 0, world.log("cluster-create").read_text()
            with Buffer.connect(f"redis://127.0.0.1:{first},127.0.0.1:{first + 1}/0", "r", password=PASSWORD) as buffer:
                buffer.create_run()
                assert len(buffer.servers.primaries()) == 3
            assert [world.stop(node) for node in NODES] == [0] * len(NODES)
            del world.processes["cluster-create"]
        assert PASSWORD not in "".join(path.read_text() for path in tmp_path.glob("*.log"))
