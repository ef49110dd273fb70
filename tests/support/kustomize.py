"""Kustomizations as `kubectl kustomize` builds them, as far as deploy/kubernetes uses it: resources, strategic-merge
patches by file, and generated ConfigMaps, whose names get no digest here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
KNOWN = {"apiVersion", "kind", "resources", "patches", "configMapGenerator"}
MERGED_BY = {"volumeMounts": "mountPath", "containers": "name", "volumes": "name", "env": "name"}
"""Lists that a patch merges, and the key of their items; others it replaces."""


def built(folder: Path) -> list[dict[str, Any]]:
    """The manifests of the kustomization in `folder`."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    assert set(kustomization) <= KNOWN, kustomization
    found: list[dict[str, Any]] = []
    for name in kustomization.get("resources", []):
        found += built(folder / name) if (folder / name).is_dir() else _documents(folder / name)
    for generated in kustomization.get("configMapGenerator", []):
        data = {name: (folder / name).read_text("utf-8") for name in generated["files"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generated["name"]}, "data": data})
    for patch in kustomization.get("patches", []):
        for change in _documents(folder / patch["path"]):
            (at,) = [index for index, manifest in enumerate(found) if identity(manifest) == identity(change)]
            found[at] = merged(found[at], change)
    return found


def identity(manifest: Mapping[str, Any]) -> tuple[str, str]:
    """Kind and name."""
    return manifest["kind"], manifest["metadata"]["name"]


def _documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with what `change` names; None removes a key."""
    found = dict(base)
    for key, value in change.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict) and isinstance(found.get(key), dict):
            found[key] = merged(found[key], value)
        elif key in MERGED_BY and key in found:
            found[key] = _merged_lists(found[key], value, MERGED_BY[key])
        else:
            found[key] = value
    return found


def _merged_lists(base: Sequence[Any], changes: Sequence[Any], key: str) -> list[Any]:
    by_key = {item[key]: item for item in base}
    for change in changes:
        by_key[change[key]] = merged(by_key.get(change[key], {}), change)
    return list(by_key.values())
