import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollq.cli.commands.metrics import metrics
from rollq.cli.settings.file import load_settings
from rollq.monitor.metrics.shared_status import LONGEST_S
from support.compose_file import COMPOSE, read_compose, seconds

MODEL = read_compose({})
SERVICES: dict[str, dict[str, Any]] = MODEL["services"]
ONE_SHOT = ("prepare-cpu", "cluster-create")
CHARTS = ("prometheus", "grafana")
NODES = [name for name, service in SERVICES.items() if "NODE" in service.get("environment", {})]


@pytest.mark.parametrize("name", ["compose.yaml"])
def test_the_compose_file_fits_the_specification(name: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    result = subprocess.run([*command, str(COMPOSE / name)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_with_users_and_tls_it_fits_too(tmp_path: Path) -> None:
    (tmp_path / "merged.yaml").write_text(yaml.safe_dump(read_compose({}, secure=True)), "utf-8")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    result = subprocess.run([*command, str(tmp_path / "merged.yaml")], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_with_users_each_role_has_the_secrets_of_its_user_and_no_other() -> None:
    model = read_compose({}, secure=True)
    for name, service in model["services"].items():
        user = service.get("environment", {}).get("ROLLQ_REDIS_USER", "").removeprefix("demo-")
        if not user:
            assert name in {*ONE_SHOT, *CHARTS, *NODES, "redis"}
            continue
        assert service["secrets"] == [
            "ca.crt",
            {"source": user, "target": "password"},
            {"source": f"{user}.crt", "target": "tls.crt"},
            {"source": f"{user}.key", "target": "tls.key"},
        ]
        assert set(service["depends_on"]) == ({"redis"} if name == "functions" else {"functions", *depends_on(name)})
        assert service["environment"]["ROLLQ_REDIS_URL"].startswith("rediss://")


def depends_on(name: str) -> set[str]:
    return set(SERVICES[name]["depends_on"])


def test_a_compose_file_with_a_misspelt_key_does_not(tmp_path: Path) -> None:
    text = (COMPOSE / "compose.yaml").read_text("utf-8")
    (tmp_path / "compose.yaml").write_text(text.replace("stop_grace_period", "stop_grace", 1))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    assert subprocess.run([*command, str(tmp_path / "compose.yaml")], capture_output=True).returncode == 1


def test_nothing_but_charts_and_dashboard_is_reachable_from_outside_the_compose_network() -> None:
    ports = {"grafana": ["127.0.0.1:3000:3000"], "dashboard": ["127.0.0.1:8484:8484"]}
    assert MODEL["networks"] == {"rollq": {"internal": True}, "loopback": {}}
    for name, service in SERVICES.items():
        assert service["networks"] == ["rollq", *(["loopback"] if name in ports else [])]
        assert service.get("ports", []) == ports.get(name, [])
        assert not {"expose", "network_mode", "pid", "ipc"} & set(service)


def test_the_charts_are_for_reading_only_and_grafana_has_no_password_to_guess() -> None:
    given = SERVICES["grafana"]["environment"]
    assert (given["GF_AUTH_ANONYMOUS_ENABLED"], given["GF_AUTH_ANONYMOUS_ORG_ROLE"]) == ("true", "Viewer")
    assert given["GF_AUTH_BASIC_ENABLED"] == "false"
    assert given["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"


def test_prometheus_asks_the_metrics_service_at_its_default_port_and_waits_longer_than_a_reading() -> None:
    configured = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text("utf-8"))
    default = {option.name: option.default for option in metrics.params}["port"]
    assert configured["scrape_configs"][0]["static_configs"] == [{"targets": [f"metrics:{default}"]}]
    assert seconds(configured["global"]["scrape_timeout"]) > LONGEST_S
    assert SERVICES["metrics"]["command"][-4:] == ["--host", "0.0.0.0", "--allowed-host", "metrics"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_runs_without_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] not in ("", "root", "0", "0:0")
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert service["read_only"] is True
    assert not {"privileged", "cap_add", "devices"} & set(service)


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_bounds_its_logs_and_says_what_happens_when_it_ends(name: str) -> None:
    service = SERVICES[name]
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert (service["restart"] == "no") is (name in ONE_SHOT)
    assert service["restart"] in ("no", "unless-stopped", "on-failure")
    assert service["stop_grace_period"]
    assert ("test" in service["healthcheck"]) is (name not in ONE_SHOT)


def test_the_password_is_a_secret_and_stands_nowhere() -> None:
    assert MODEL["secrets"] == {"redis_password": {"file": "./secrets/redis_password"}}
    for name in set(SERVICES) - {"prepare-cpu", *CHARTS}:
        assert SERVICES[name]["secrets"] == ["redis_password"]
        assert "ROLLQ_REDIS_PASSWORD" not in SERVICES[name].get("environment", {})
    ignored = subprocess.run(["git", "check-ignore", "-q", "compose/secrets/redis_password"], cwd=COMPOSE.parent)
    assert ignored.returncode == 0


@pytest.mark.parametrize("name", ["redis", *NODES])
def test_the_store_keeps_everything_it_is_given(name: str) -> None:
    command = SERVICES[name]["command"][-1]
    for option in ("--appendonly yes", "--appendfsync everysec", "--maxmemory-policy noeviction", "--maxmemory 4gb"):
        assert option in command
    assert SERVICES[name]["volumes"] == [f"{name}:/data"]


def test_the_cluster_has_the_nodes_that_are_joined_and_the_roles_wait_for_them() -> None:
    places = [f"{name}:{SERVICES[name]['environment']['PORT']}" for name in NODES]
    assert [SERVICES[name]["environment"]["NODE"] for name in NODES] == NODES
    assert f'names="{" ".join(places)}"' in SERVICES["cluster-create"]["command"][-1]
    assert SERVICES["cluster-create"]["depends_on"] == {name: {"condition": "service_healthy"} for name in NODES}
    assert f"redis://{','.join(places[:3])}/0" in (COMPOSE / "compose.yaml").read_text("utf-8")
    created = {"condition": "service_completed_successfully", "required": False}
    for name in set(SERVICES) - {"redis", *NODES, *ONE_SHOT, *CHARTS}:
        assert SERVICES[name]["depends_on"]["cluster-create"] == created, "which is not there without the profile"


@pytest.mark.parametrize("name", ["worker", "trainer"])
def test_gpu_roles_ask_for_nvidia_gpus_and_take_one_each(name: str) -> None:
    devices = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    assert SERVICES[name]["command"][0] == "on-free-gpu"


def test_the_cpu_profile_has_the_same_roles_without_a_gpu() -> None:
    for role in ("producer", "worker", "trainer"):
        gpu, cpu = SERVICES[role], SERVICES[f"{role}-cpu"]
        assert (gpu["profiles"], cpu["profiles"]) == (["gpu"], ["cpu"])
        assert gpu["command"][-3:] == cpu["command"]
        assert "deploy" not in cpu


@pytest.mark.parametrize(("profile", "suffix"), [("gpu", ""), ("cpu", "-cpu")])
def test_a_worker_is_given_more_time_to_stop_than_it_takes(profile: str, suffix: str) -> None:
    settings = load_settings(COMPOSE / f"rollq-{profile}.toml", {})
    assert seconds(SERVICES[f"worker{suffix}"]["stop_grace_period"]) >= settings.worker.grace_s + 10


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_settings_name_only_places_that_the_containers_have(profile: str) -> None:
    settings = load_settings(COMPOSE / f"rollq-{profile}.toml", {})
    assert settings.trainer is not None
    places = [settings.trainer.model, *(task.prompts for task in settings.tasks.values())]
    assert all(str(place).startswith("/data/") for place in (*places, settings.worker.options["model"]))
    assert str(settings.trainer.output) == "/output"
    assert settings.trainer.device == settings.worker.options["device"] == {"gpu": "cuda", "cpu": "cpu"}[profile]


def test_weights_that_gpu_roles_share_are_mounted_at_the_same_place() -> None:
    assert "output:/output" in SERVICES["trainer"]["volumes"]
    assert "output:/output:ro" in SERVICES["worker"]["volumes"]


def test_every_volume_and_config_is_declared_and_used() -> None:
    mounts = [mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])]
    assert set(MODEL["volumes"]) == {mount for mount in mounts if not mount.startswith(".")}
    for config in MODEL["configs"].values():
        assert (COMPOSE / config["file"]).is_file()
