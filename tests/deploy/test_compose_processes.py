import re
from pathlib import Path

import pytest
import redis

from rollq.buffer.store.server import free_port
from rollq.monitor.records import METRICS_FILE, read_steps
from support.compose_file import COMPOSE, PASSWORD, Containers

FAKE_GPUS = "#!/bin/sh\nprintf '0\\n1\\n'\n"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The volume that `prepare-cpu` fills, with a model that has learnt next to nothing."""
    with Containers(tmp_path_factory.mktemp("c"), free_port("127.0.0.1"), {"ROLLQ_WARM_UP_STEPS": "1"}) as world:
        for _ in ("make everything", "find it made"):
            world.start("prepare-cpu")
            assert world.finish("prepare-cpu") == 0, world.log("prepare-cpu").read_text()
        return world.volume("demo")


def answers(world: Containers) -> bool:
    try:
        with redis.Redis(port=world.port, password=PASSWORD, socket_connect_timeout=1) as client:
            return client.ping() is True
    except redis.RedisError:
        return False


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_the_services_of_a_profile_train_and_stop_cleanly(profile: str, prepared: Path, tmp_path: Path) -> None:
    suffix = {"cpu": "-cpu", "gpu": ""}[profile]
    variables = {"ROLLQ_DATA": str(prepared), "ROLLQ_CONFIG": str(COMPOSE / "rollq-cpu.toml")}
    with Containers(tmp_path, free_port("127.0.0.1"), variables, {"demo": prepared}) as world:
        (world.programs / "nvidia-smi").write_text(FAKE_GPUS)
        (world.programs / "nvidia-smi").chmod(0o755)
        world.start("redis")
        world.wait_until(lambda: answers(world))
        roles = [role + suffix for role in ("producer", "worker", "trainer")]
        assert not world.healthy(roles[0])
        for role in roles:
            world.start(role)
        metrics = world.volume("output" + suffix) / METRICS_FILE
        world.wait_until(lambda: metrics.exists() and len(read_steps(metrics)) >= 2)
        assert all(world.healthy(role) for role in roles)
        assert PASSWORD not in "".join(world.log(role).read_text() for role in roles)
        assert [world.stop(role) for role in [*roles, "redis"]] == [0, 0, 0, 0]
        assert not world.healthy(roles[0])
        if profile == "gpu":
            logs = "".join(world.log(role).read_text() for role in roles)
            assert sorted(re.findall(r"rollq gets GPU (\d+)", logs)) == ["0", "1"]


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
