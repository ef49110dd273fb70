"""Manifests of Kubernetes as processes of this machine, with their exact commands, environments and probes.

What a pod has in its container becomes this machine's: mounted volumes lie under one folder, `rollq-store:6379` is a
port of loopback, the images' programs are on PATH.
"""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from support.compose_file import swapped
from support.waiting import PATIENCE_S, wait_while_alive


@dataclass
class Pods:
    """Pods of `manifests`; leaving the `with` block kills the remaining pods. `volumes` has the folder of each
    ConfigMap, Secret and claim, by its name. `ports` maps ports in a pod to ports here.
    """

    root: Path
    manifests: Sequence[Mapping[str, Any]]
    volumes: Mapping[str, Path]
    ports: Mapping[int, int]
    programs: Mapping[str, Path]
    processes: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._bin = self.root / "bin"
        self._bin.mkdir()
        for name, program in {"rollq": Path(sys.executable).with_name("rollq"), **self.programs}.items():
            (self._bin / name).symlink_to(program)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, name: str) -> None:
        """Start the only container of the manifest `rollq-<name>`."""
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self._local(name, self._container(name)["args"]),
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def stop(self, name: str) -> int:
        """Stop a pod as Kubernetes does, but without killing a slow one; returns its exit status."""
        self.processes[name].terminate()
        return self.processes[name].wait(PATIENCE_S)

    def log(self, name: str) -> Path:
        """Output of a pod."""
        return self.root / f"{name}.log"

    def passes(self, name: str, probe: str) -> bool:
        """Run a probe once, such as `readinessProbe`."""
        how = self._container(name)[probe]
        if "httpGet" in how:
            (port,) = [self.ports[port["containerPort"]] for port in self._container(name)["ports"]]
            try:
                return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}{how['httpGet']['path']}").status == 200)
            except OSError:
                return False
        command = self._local(name, how["exec"]["command"])
        return subprocess.run(command, env=self._environment(name), capture_output=True).returncode == 0

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Wait while no pod ends."""
        wait_while_alive(happened, self.processes, lambda name: self.log(name).read_text())

    def _pod(self, name: str) -> Any:
        (manifest,) = [m for m in self.manifests if m["metadata"]["name"] == f"rollq-{name}" and _has_pod(m)]
        return manifest["spec"]["template"]["spec"]

    def _container(self, name: str) -> Any:
        return self._pod(name)["containers"][0]

    def _environment(self, name: str) -> dict[str, str]:
        given = self._container(name).get("env", [])
        values = self._local(name, [variable["value"] for variable in given])
        system = {"PATH": f"{self._bin}{os.pathsep}{os.defpath}", "TMPDIR": str(self.root)}
        return system | dict(zip([variable["name"] for variable in given], values, strict=True))

    def _local(self, name: str, words: Sequence[str]) -> list[str]:
        here = {"rollq-store:6379": f"127.0.0.1:{self.ports[6379]}"}
        here |= {str(port): str(local) for port, local in self.ports.items()}
        sources = {volume["name"]: _source(volume) for volume in self._pod(name).get("volumes", [])}
        for mount in self._container(name)["volumeMounts"]:
            folder = self.volumes.get(sources.get(mount["name"], mount["name"]), self.root / mount["name"])
            folder.mkdir(exist_ok=True)
            here[mount["mountPath"]] = str(folder)
        if {"metrics", "dashboard"} & set(words):
            (port,) = self._container(name)["ports"]
            words = [*words, "--port", str(port["containerPort"])]
        return [swapped(word, here) for word in words]


def _has_pod(manifest: Mapping[str, Any]) -> bool:
    return "template" in manifest.get("spec", {})


def _source(volume: Mapping[str, Any]) -> str:
    """The name of what a volume holds, or that of the volume."""
    return str(
        volume.get("configMap", {}).get("name")
        or volume.get("secret", {}).get("secretName")
        or volume.get("persistentVolumeClaim", {}).get("claimName")
        or volume["name"]
    )
