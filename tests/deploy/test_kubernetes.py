"""deploy/kubernetes: schemas, the rules that hold for every manifest, and each command as `rollq` would parse it."""

import shutil
import subprocess
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollq.cli.main import main
from rollq.cli.settings.file import load_settings
from rollq.monitor.metrics.catalogue import METRICS
from support.kustomize import KUBERNETES, MERGED_BY, built, identity

VERSION = "1.33"
FOLDERS = ("base", "overlays/secure", "overlays/keda", "overlays/archive")
BUILT = {folder: built(KUBERNETES / folder) for folder in FOLDERS}
PODS = [
    pytest.param(manifest, id=f"{folder} {manifest['metadata']['name']}")
    for folder, manifests in BUILT.items()
    for manifest in manifests
    if "template" in manifest.get("spec", {})
]


def the(kind: str, name: str, folder: str = "base") -> Any:
    """The manifest of this kind and name."""
    return next(manifest for manifest in BUILT[folder] if identity(manifest) == (kind, name))


def container_of(manifest: Any) -> Any:
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    return container


def check(manifest: Any) -> None:
    """Raise unless the manifest fits its schema, and has no key that the schema does not know."""
    if manifest["apiVersion"].startswith("keda.sh/"):
        from cloudcoil.models.keda.v1alpha1 import ScaledObject

        known = ScaledObject.model_validate(manifest).model_dump(by_alias=True, exclude_unset=True, mode="json")
        assert manifest == known, "a key is unknown"
    else:
        import kubernetes_validate

        kubernetes_validate.validate(manifest, VERSION, strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_manifest_fits_its_schema(folder: str) -> None:
    for manifest in BUILT[folder]:
        check(manifest)


@pytest.mark.parametrize(
    ("kind", "name", "misspelt", "refusal"),
    [
        ("Deployment", "rollq-worker", "replica", "'replica' was unexpected"),
        ("ScaledObject", "rollq-worker", "minReplicas", "a key is unknown"),
    ],
)
def test_a_manifest_with_a_misspelt_key_does_not(kind: str, name: str, misspelt: str, refusal: str) -> None:
    from kubernetes_validate import ValidationError

    manifest = the(kind, name, "overlays/keda")
    with pytest.raises((ValidationError, AssertionError), match=refusal):
        check({**manifest, "spec": {**manifest["spec"], misspelt: 1}})


@pytest.mark.parametrize("folder", FOLDERS)
def test_kubectl_builds_the_same(folder: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl on the PATH")
    text = subprocess.run(
        [kubectl, "kustomize", str(KUBERNETES / folder)], capture_output=True, text=True, check=True
    ).stdout
    (settings,) = [m["metadata"]["name"] for m in yaml.safe_load_all(text) if m["kind"] == "ConfigMap"]
    theirs = list(yaml.safe_load_all(text.replace(settings, "rollq")))
    assert sorted(map(in_order, theirs), key=identity) == sorted(map(in_order, BUILT[folder]), key=identity)


def in_order(value: Any) -> Any:
    """`value` with the lists that a patch merges sorted: their order means nothing."""
    if isinstance(value, dict):
        return {
            key: in_order(sorted(v, key=itemgetter(MERGED_BY[key])) if key in MERGED_BY else v)
            for key, v in value.items()
        }
    return [in_order(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("manifest", PODS)
def test_every_command_is_one_that_rollq_knows(manifest: Any) -> None:
    container = container_of(manifest)
    commands = [container["args"]]
    commands += [container[probe]["exec"]["command"] for probe in probes(container) if "exec" in container[probe]]
    for program, *arguments in commands:
        if program == "sh":
            assert subprocess.run(["/bin/sh", "-n", "-c", arguments[1]], capture_output=True, text=True).stderr == ""
        else:
            assert program == "rollq"
            name, rest = arguments[0], arguments[1:]
            command = main.get_command(main.make_context("rollq", [name, "--help"], resilient_parsing=True), name)
            assert command is not None
            assert command.make_context(name, list(rest)).params["file"] == Path("/etc/rollq/rollq.toml")


def probes(container: Any) -> list[str]:
    return [key for key in container if key.endswith("Probe")]


@pytest.mark.parametrize("manifest", PODS)
def test_every_pod_runs_without_privileges_and_within_limits(manifest: Any) -> None:
    pod, container = manifest["spec"]["template"]["spec"], container_of(manifest)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert {mount["name"] for mount in container["volumeMounts"]} <= {
        *(volume["name"] for volume in pod["volumes"]),
        *(claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", [])),
    }
    assert manifest["metadata"]["labels"] == manifest["spec"]["template"]["metadata"]["labels"]
    assert manifest["spec"].get("selector", {"matchLabels": manifest["metadata"]["labels"]}) == {
        "matchLabels": manifest["metadata"]["labels"]
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_password_is_in_a_manifest_and_every_role_reads_one_from_a_file(folder: str) -> None:
    assert "Secret" not in {manifest["kind"] for manifest in BUILT[folder]}
    for manifest in BUILT[folder]:
        if "template" in manifest.get("spec", {}) and manifest["metadata"]["name"] != "rollq-store":
            given = {variable["name"]: variable["value"] for variable in container_of(manifest)["env"]}
            assert given["ROLLQ_REDIS_PASSWORD_FILE"] == "/run/secrets/rollq/password"
            assert "ROLLQ_REDIS_PASSWORD" not in given


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_store_keeps_everything_it_is_given(folder: str) -> None:
    script = container_of(the("StatefulSet", "rollq-store", folder))["args"][-1]
    for option in ("--appendonly yes", "--appendfsync everysec", "--maxmemory-policy noeviction", "--maxmemory 8gb"):
        assert option in script
    assert "--dir /store" in script


def test_a_worker_has_a_gpu_time_to_drain_and_no_probe_that_would_kill_a_slow_one() -> None:
    manifest = the("Deployment", "rollq-worker")
    settings = load_settings(KUBERNETES / "base" / "rollq.toml", {})
    assert manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= settings.worker.grace_s + 10
    assert container_of(manifest)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert probes(container_of(manifest)) == ["readinessProbe"]
    assert manifest["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0


def test_settings_name_only_places_that_the_pods_have() -> None:
    settings = load_settings(KUBERNETES / "base" / "rollq.toml", {})
    assert settings.trainer is not None
    places = [settings.trainer.model, *(task.prompts for task in settings.tasks.values())]
    assert all(str(place).startswith("/data/") for place in (*places, settings.worker.options["model"]))
    assert str(settings.trainer.output) == "/output"
    for kind, role in (("StatefulSet", "trainer"), ("Deployment", "worker")):
        mounts = {
            m["mountPath"]: m.get("readOnly", False) for m in container_of(the(kind, f"rollq-{role}"))["volumeMounts"]
        }
        assert (mounts["/data"], mounts["/output"]) == (True, role == "worker")


def test_workers_are_scaled_by_a_metric_that_is_served_and_the_run_of_the_settings() -> None:
    (trigger,) = the("ScaledObject", "rollq-worker", "overlays/keda")["spec"]["triggers"]
    run = load_settings(KUBERNETES / "base" / "rollq.toml", {}).run
    assert trigger["metadata"]["query"] == f'max(rollq_wanted_workers{{run="{run}"}})'
    assert "rollq_wanted_workers" in {metric.name for metric in METRICS}
    assert "replicas" not in the("Deployment", "rollq-worker", "overlays/keda")["spec"], "KEDA sets it"
    assert "replicas" in the("Deployment", "rollq-worker")["spec"]


def test_archiver_and_trainer_share_the_folder_of_the_archive() -> None:
    for kind, role in (("StatefulSet", "trainer"), ("Deployment", "archiver")):
        manifest = the(kind, f"rollq-{role}", "overlays/archive")
        claims = {
            volume["name"]: volume["persistentVolumeClaim"]
            for volume in manifest["spec"]["template"]["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        }
        assert claims["archive"] == {"claimName": "rollq-archive"}
        mounts = {mount["mountPath"]: mount for mount in container_of(manifest)["volumeMounts"]}
        assert mounts["/archive"] == {"mountPath": "/archive", "name": "archive"}


def test_with_users_each_role_has_the_secret_of_its_user() -> None:
    run = load_settings(KUBERNETES / "base" / "rollq.toml", {}).run
    for manifest in BUILT["overlays/secure"]:
        if "template" in manifest.get("spec", {}) and manifest["metadata"]["name"] != "rollq-store":
            pod = manifest["spec"]["template"]["spec"]
            given = {variable["name"]: variable["value"] for variable in container_of(manifest)["env"]}
            user = given["ROLLQ_REDIS_USER"].removeprefix(f"{run}-")
            (secret,) = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
            assert secret == f"rollq-{user}"
            assert given["ROLLQ_REDIS_URL"].startswith("rediss://")


@pytest.mark.parametrize("folder", FOLDERS)
def test_pods_reach_only_those_that_a_policy_names(folder: str) -> None:
    policies = [one for one in BUILT[folder] if one["kind"] == "NetworkPolicy"]
    rules = [rule for policy in policies for rule in policy["spec"].get("egress", ())]
    assert rules
    assert all(peer for rule in rules for peer in rule["to"])
    (names,) = [rule["to"] for rule in rules if any(port["port"] == 53 for port in rule["ports"])]
    assert names == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
        }
    ]
