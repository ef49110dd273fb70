"""compose.yaml as an engine reads it, and its services as processes of this machine instead of containers.

A service's process gets its exact command and environment. What a container has of its own becomes this machine's:
volumes, configs and secrets lie under one folder, `redis:6379` is a port of loopback, the images' programs are on PATH.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from rollq.buffer.store.embedded_server import embedded_binary
from support.waiting import PATIENCE_S, wait_while_alive

COMPOSE = Path(__file__).parents[2] / "compose"
PASSWORD = "correct-horse-battery-staple"


def read_compose(variables: Mapping[str, str], *, secure: bool = False) -> dict[str, Any]:
    """The compose file with `variables` replaced, and with `secure`, with the changes of secure.yaml."""
    model = yaml.safe_load((COMPOSE / "compose.yaml").read_text("utf-8"))
    if secure:
        text = (COMPOSE / "secure.yaml").read_text("utf-8")
        model = _merged(model, yaml.safe_load(text.replace("secrets: !override", "secrets:")))
    replaced = _replaced(model, variables)
    assert isinstance(replaced, dict)
    return replaced


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `change`: maps are merged, all else is replaced."""
    both = {key: _merged(base[key], value) for key, value in change.items() if isinstance(base.get(key), dict)}
    return {**base, **change, **both}


def _replaced(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, variables) for item in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"\$(?:(\$)|\{(\w+):-([^}]*)\})", lambda m: m[1] or variables.get(m[2]) or m[3], value)


def seconds(duration: str) -> float:
    """A duration of the compose specification that has one unit."""
    found = re.fullmatch(r"(\d+)(s|m)", duration)
    assert found is not None, duration
    return int(found[1]) * {"s": 1, "m": 60}[found[2]]


@dataclass
class Containers:
    """Services run as processes; leaving the `with` block kills what is left of them."""

    root: Path
    port: int
    variables: Mapping[str, str]
    filled: Mapping[str, Path] = field(default_factory=dict)  # named volumes that exist already
    nodes: Sequence[int] = ()  # ports of the cluster's nodes
    secrets: Path | None = None  # the folder compose/secrets, for secure.yaml
    processes: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.compose = read_compose(self.variables, secure=self.secrets is not None)
        self.programs = self.root / "bin"
        self.programs.mkdir(parents=True)
        self.secret = self.root / "redis_password"
        self.secret.write_text(PASSWORD + "\n")
        (self.programs / "valkey-server").symlink_to(embedded_binary())
        (self.programs / "rollq").symlink_to(Path(sys.executable).with_name("rollq"))
        (self.programs / "on-free-gpu").symlink_to(COMPOSE / "on-free-gpu")
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def volume(self, source: str) -> Path:
        """The folder of a volume: a named one, or one of the host."""
        named = self.filled.get(source, self.root / "volumes" / source)
        path = named if source in self.compose["volumes"] else Path(source)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def start(self, service: str) -> None:
        """Start a service; it ends with the `with` block, or by `stop`."""
        with self.log(service).open("ab") as log:
            self.processes[service] = subprocess.Popen(
                self._local(service, self.compose["services"][service]["command"]),
                env=self._environment(service),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, service: str) -> Path:
        """Output of the service."""
        return self.root / f"{service}.log"

    def finish(self, service: str) -> int:
        """Wait until a service has ended by itself; returns its exit status."""
        return self.processes[service].wait(PATIENCE_S)

    def stop(self, service: str) -> int:
        """Stop a service as an engine does, but without killing a slow one; returns its exit status."""
        self.processes[service].terminate()
        return self.processes[service].wait(PATIENCE_S)

    def healthy(self, service: str) -> bool:
        """Run the service's health check once."""
        kind, *command = self.compose["services"][service]["healthcheck"]["test"]
        if kind == "CMD-SHELL":
            command = ["/bin/sh", "-c", *command]
        done = subprocess.run(
            self._local(service, command), env=self._environment(service), capture_output=True, timeout=PATIENCE_S
        )
        return done.returncode == 0

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Wait while no service ends."""
        wait_while_alive(happened, self.processes, lambda service: self.log(service).read_text())

    def _environment(self, service: str) -> dict[str, str]:
        given = self.compose["services"][service].get("environment", {})
        names, values = list(given), self._local(service, list(given.values()))
        system = {"PATH": f"{self.programs}{os.pathsep}{os.defpath}", "TMPDIR": str(self.root)}
        return system | dict(zip(names, values, strict=True))

    def _secrets(self, service: str) -> list[dict[str, str]]:
        given = self.compose["services"][service].get("secrets", [])
        return [{"source": one, "target": one} if isinstance(one, str) else one for one in given]

    def _file_of(self, secret: str) -> Path:
        if self.secrets is None:
            return self.secret
        return self.secrets / str(self.compose["secrets"][secret]["file"]).removeprefix("./secrets/")

    def _local(self, service: str, words: list[str]) -> list[str]:
        """`words` with the paths and names that hold inside the service's container replaced by those of here."""
        here = {"redis:6379": f"127.0.0.1:{self.port}", "6379": str(self.port)}
        for number, port in enumerate(self.nodes):
            here |= {f"cluster-{number + 1}": "127.0.0.1", str(7000 + number): str(port)}
        for secret in self._secrets(service):
            here[f"/run/secrets/{secret['target']}"] = str(self._file_of(secret["source"]))
        for mount in self.compose["services"][service].get("volumes", []):
            source, target = mount.removesuffix(":ro").split(":")
            here[target] = str(self.volume(source))
        for mount in self.compose["services"][service].get("configs", []):
            source = COMPOSE / self.compose["configs"][mount["source"]]["file"]
            config = self.root / f"{service}.toml"
            config.write_text(swapped(source.read_text("utf-8"), here), "utf-8")
            here[mount["target"]] = str(config)
        return [swapped(word, here) for word in words]


def swapped(text: str, here: Mapping[str, str]) -> str:
    """`text` with every key of `here` replaced by its value, longer keys first; a number is replaced as a whole."""
    longest_first = sorted(here, key=len, reverse=True)
    keys = "|".join(rf"(?<!\d){re.escape(key)}(?!\d)" if key.isdigit() else re.escape(key) for key in longest_first)
    return re.sub(keys, lambda found: here[found[0]], text)
