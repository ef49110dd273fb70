"""Runs roles as child processes and leaves none of them behind, however the parent ends.

All children share one process group, led by a guardian: a shell that reads from a pipe which only the parent holds
open. When the parent dies, even by SIGKILL, the pipe closes and the guardian kills the group, itself included. A
terminal's Ctrl-C reaches the parent alone, which then stops the children in order.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rollq.buffer.errors import RollqError

GUARDIAN = ("/bin/sh", "-c", "read _; kill -KILL 0")
MAX_RESTARTS = 5
STOP_S = 2.5
"""Seconds between SIGTERM and SIGKILL."""
TAIL_LINES = 15


class RoleFailed(RollqError):
    """A role of the demo died more often than it is restarted. The message ends with the last lines of its log."""


@dataclass(slots=True)
class Role:
    """One child process, restarted whenever it exits. With `finishes`, exit status 0 means that its work is done."""

    name: str
    command: Sequence[str]
    finishes: bool = False
    process: "subprocess.Popen[bytes] | None" = None
    restarts: int = 0

    @property
    def finished(self) -> bool:
        """Whether the role has completed its work."""
        return self.finishes and self.process is not None and self.process.poll() == 0


@dataclass(slots=True)
class Supervisor:
    """Child processes that live as long as the `with` block. Each writes its output to `<logs>/<name>.log`."""

    logs: Path
    environment: Mapping[str, str]
    roles: list[Role] = field(default_factory=list)
    _guardian: "subprocess.Popen[bytes] | None" = None

    def __enter__(self) -> Self:
        self.logs.mkdir(parents=True, exist_ok=True)
        self._guardian = subprocess.Popen(
            GUARDIAN, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def group(self) -> int:
        """The process group of the children."""
        assert self._guardian is not None, "a Supervisor starts children inside its `with` block"
        return self._guardian.pid

    def start(self, name: str, command: Sequence[str], *, finishes: bool = False) -> Role:
        """Start a role; see `Role`."""
        role = Role(name, tuple(command), finishes)
        self.roles.append(role)
        self._spawn(role)
        return role

    def restart_dead(self) -> list[str]:
        """Restart every dead child; returns a line about each.

        Raises `RoleFailed` when one has died more than `MAX_RESTARTS` times.
        """
        notes = []
        for role in self.roles:
            status = role.process.poll() if role.process else None
            if status is not None and not role.finished:
                self._restart(role, status)
                notes.append(f"{role.name} died ({describe_exit(status)}) and was restarted")
        return notes

    def _restart(self, role: Role, status: int) -> None:
        if role.restarts >= MAX_RESTARTS:
            raise RoleFailed(
                f"{role.name} died {role.restarts + 1} times, last with {describe_exit(status)}; the end of "
                f"{self.log(role)}:\n{tail(self.log(role))}"
            )
        role.restarts += 1
        self._spawn(role)

    def stop(self) -> None:
        """Send SIGTERM to every child in the order of their start, and SIGKILL `STOP_S` seconds later."""
        if self._guardian is None:
            return
        processes = [role.process for role in self.roles if role.process is not None]
        _terminate(processes)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        for process in (*processes, self._guardian):
            process.wait()
        if self._guardian.stdin:
            self._guardian.stdin.close()
        self._guardian = None

    def log(self, role: Role) -> Path:
        """File with the role's output."""
        return self.logs / f"{role.name}.log"

    def _spawn(self, role: Role) -> None:
        with self.log(role).open("ab") as log:
            role.process = subprocess.Popen(
                role.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                process_group=self.group,
            )


def _terminate(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Send SIGTERM to all, and wait up to `STOP_S` seconds for them to exit."""
    for process in processes:
        process.terminate()
    deadline_s = time.monotonic() + STOP_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline_s - time.monotonic()))


def describe_exit(status: int) -> str:
    """An exit status in words."""
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last `lines` lines of a log."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
