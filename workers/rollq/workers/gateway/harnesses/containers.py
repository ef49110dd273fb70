"""Runs a session's command in a container of podman or docker, with the session's folder.

A container's first process waits, and reaps orphans. All functions block: call them in a thread.
"""

import hashlib
import io
import math
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollq.buffer.common.child_processes import INHERITED
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.workers.gateway.harnesses.process import HarnessFolder

PROGRAMS: Final = ("podman", "docker")
LABEL: Final = "rollq.sessions"
"""The label with the folder of all sessions."""
METADATA: Final = "/rollq-metadata.json"
"""The file with the row's metadata."""
LIFETIME_S: Final = 86_400
"""How many seconds a container outlives its command's time if its worker is killed and never restarts."""
TURNS: Final = "1 2 3 4 5 6 7 8"
"""The waits of the first process. There are several, because killing all other processes ends one of them."""
CALL_S: Final = 300.0
MOST_SHOWN: Final = 2000
CLIENT: Final = (
    *("HOME", "USER", "XDG_", "DBUS_", "CONTAINER", "DOCKER_", "PODMAN_", "BUILDAH_", "STORAGE_"),
    *("HTTP", "http", "NO_PROXY", "no_proxy"),
)
"""The prefixes of variables that podman and docker read."""
END_ALL: Final = '"$@"; code=$?; kill -9 -1 2>/dev/null; exit $code'
"""A script that runs a command, then kills leftover processes: podman or docker would wait for their output."""


class ContainerError(OSError):
    """A call to podman or docker failed."""


@dataclass(frozen=True, slots=True)
class Container:
    """The container of the session in the folder `root`."""

    program: str
    root: Path

    @property
    def name(self) -> str:
        """The container's name, which is the same in later processes."""
        return f"rollq-{self.root.name}-{hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]}"

    def start(self, image: str, most_processes: int, lifetime_s: float, shown: Sequence[Path] = ()) -> None:
        """Start the container with read-only access to folders of this machine. Raises `ContainerError`."""
        turn_s = math.ceil((lifetime_s + LIFETIME_S) / len(TURNS.split()))
        wait = f"for turn in {TURNS}; do sleep {turn_s}; done"  # the shell stays and reaps orphans
        command = [
            *("run", "--detach", "--pull=never", "--network=host", "--name", self.name),
            *("--label", f"{LABEL}={self.root.parent}", "--stop-signal=KILL"),
            f"--pids-limit={most_processes}",
            *(f"--volume={path}:{path}:ro" for path in shown),
            *("--entrypoint=sh", image, "-c", wait),
        ]
        try:
            call(self.program, *command)
        except ContainerError:
            self.remove()  # a killed worker's container has the name, or this container could not start
            call(self.program, *command)

    def command(self, command: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """The command that runs `command` in the container, and its environment. Its arguments, which other users can
        see, contain only values of variables that podman or docker reads."""
        client = client_environment()
        named = [f"--env={name}={value}" if name in client else f"--env={name}" for name, value in variables.items()]
        run = [self.program, "exec", "--interactive", *named, self.name, "sh", "-c", END_ALL, "sh", *command]
        return run, {**variables, **client}

    def copy_in(self, source: Path, to: str) -> None:
        """Copy a file or folder to a new path. Raises `ContainerError`."""
        call(self.program, "cp", str(source), f"{self.name}:{to}")

    def content(self, path: str, most: int) -> bytes | None:
        """A file's content, or None if the file does not exist. Raises `ValueError` for anything but a file of at most
        `most` bytes."""
        command = [self.program, "cp", f"{self.name}:{path}", "-"]
        environment = client_environment()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as copying:
            assert copying.stdout is not None
            try:
                archive = copying.stdout.read(most + 4 * tarfile.RECORDSIZE)
            finally:
                copying.kill()
        with suppress(tarfile.ReadError), tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            member = opened.next()
            if member is None:
                return None
            if not member.isreg():
                raise ValueError(f"{path} is not a file")
            if member.size > most:
                raise ValueError(f"{path} is larger than {most} bytes")
            file = opened.extractfile(member)
            return None if file is None else file.read()
        return None

    def run(self, *command: str) -> None:
        """Run a short command in the container as root. Raises `ContainerError`."""
        call(self.program, "exec", "--user=0", self.name, *command)

    def stop(self) -> None:
        """End all processes and keep the files. Raises `ContainerError`."""
        call(self.program, "stop", "-t", "0", self.name)

    def start_again(self) -> None:
        """Start the container again with its files. Raises `ContainerError`."""
        call(self.program, "start", self.name)

    def remove(self) -> None:
        """Remove the container, if it exists."""
        with suppress(ContainerError):
            call(self.program, "rm", "--force", self.name)


@dataclass(frozen=True, slots=True)
class Containers:
    """Starts containers for rows with an image, which `image_of` names from the row's folder in the workspace."""

    program: str
    image_of: Callable[[Path], str]
    most_processes: int
    lifetime_s: float
    shown: Sequence[Path] = ()

    def started(self, folder: HarnessFolder, image: str) -> Container:
        """A container for a session. Raises `SampleFailed`."""
        container = Container(self.program, folder.root)
        try:
            container.start(image, self.most_processes, self.lifetime_s, self.shown)
            container.copy_in(folder.metadata, METADATA)
        except ContainerError as error:
            container.remove()
            raise SampleFailed(FailureKind.SANDBOX, f"no container of {image}: {error}") from error
        return container


def client_environment() -> dict[str, str]:
    """This process's variables that podman and docker need, without rollq's secrets."""
    return {name: value for name, value in os.environ.items() if name in INHERITED or name.startswith(CLIENT)}


def call(program: str, *arguments: str, timeout_s: float = CALL_S) -> str:
    """The output of a call to podman or docker. Raises `ContainerError`."""
    name = f"{os.path.basename(program)} {arguments[0]}"
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            env=client_environment(),
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ContainerError(f"{name}: {error}") from error
    said = done.stdout.strip()
    if done.returncode:
        raise ContainerError(f"{name}: {said[-MOST_SHOWN:] or f'exit code {done.returncode}'}")
    return said


def find_program() -> str:
    """The first of podman and docker that answers. Raises `ContainerError` if neither answers."""
    reasons = []
    for name in PROGRAMS:
        if (path := shutil.which(name)) is None:
            reasons.append(f"{name} is not on the PATH")
            continue
        try:
            call(path, "info")
        except ContainerError as error:
            reasons.append(f"{name} does not answer: {str(error).splitlines()[-1]}")
        else:
            return path
    raise ContainerError("; ".join(reasons))


def remove_left_containers(program: str, sessions: Path) -> None:
    """Remove containers of killed workers, whose sessions' folders are gone. Raises `ContainerError`."""
    found = call(program, "ps", "--all", f"--filter=label={LABEL}={sessions}", "--format={{.Names}}").split()
    # folders are listed second: a folder exists before its container
    kept = {Container(program, root).name for root in sessions.iterdir()}
    for name in found:
        if name not in kept:
            with suppress(ContainerError):
                call(program, "rm", "--force", name)
