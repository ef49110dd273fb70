"""Runs roles as child processes and leaves none of them behind, however the parent ends.

All children share one process group, led by a guardian: a shell that reads from a pipe that only the parent holds open.
When the parent dies, even by SIGKILL, the pipe closes and the guardian kills the group, itself included. A terminal's
Ctrl-C reaches the parent alone, which then stops the children in order.
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

from rollq.buffer.errors import ConfigError, RollqError

GUARDIAN = ("/bin/sh", "-c", "read _; kill -KILL 0")
MAX_RESTARTS = 5
STOP_S = 2.5
"""Default seconds between SIGTERM and SIGKILL."""
PAUSE_S = 2.0
"""Seconds before a role's second restart; each further restart waits twice as long."""
HEALTHY_S = 600.0
"""A role that has lived for this many seconds is healthy again, and its earlier deaths are forgotten."""
WRONG_SETTINGS = 2
"""Exit status of a role for which a restart is useless."""
TAIL_LINES = 15


class RoleFailed(RollqError):
    """A role died too often for another restart. The message ends with the last lines of the role's log."""


@dataclass(slots=True)
class Role:
    """One child process, restarted when it dies. A process that exits with status 0 was stopped, or has `finished`."""

    name: str
    command: Sequence[str]
    finishes: bool = False
    process: "subprocess.Popen[bytes] | None" = None
    started_s: float = 0.0
    restarts: int = 0
    dead_since_s: float | None = None

    @property
    def finished(self) -> bool:
        """Whether the role has completed its work."""
        return self.finishes and self.process is not None and self.process.poll() == 0


@dataclass(slots=True)
class Supervisor:
    """Child processes that live for the duration of the `with` block. Each writes its output to `<logs>/<name>.log`.

    At the end, each has `grace_s` seconds between SIGTERM and SIGKILL. `pause_s` replaces `PAUSE_S`.
    """

    logs: Path
    environment: Mapping[str, str]
    grace_s: float = STOP_S
    pause_s: float = PAUSE_S
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
        """The children's process group."""
        assert self._guardian is not None, "a Supervisor starts children inside its `with` block"
        return self._guardian.pid

    def start(self, name: str, command: Sequence[str], *, finishes: bool = False) -> Role:
        """Start a role; see `Role`."""
        role = Role(name, tuple(command), finishes)
        self.roles.append(role)
        self._spawn(role)
        return role

    def restart_dead(self) -> list[str]:
        """Restart every child that died, but no child that stopped cleanly; returns a line about each. Raises
        `RoleFailed` if a child has died more than `MAX_RESTARTS` times, and `ConfigError` if a child refuses its
        settings.
        """
        notes = []
        for role in self.roles:
            status = role.process.poll() if role.process else None
            if status is None or role.finished:
                continue
            if status == 0:
                role.process = None
                notes.append(f"{role.name} has stopped")
                continue
            if self._restart(role, status):
                reason = tail(self.log(role), 1)
                notes.append(f"{role.name} died ({describe_exit(status)}) and was restarted{reason and f': {reason}'}")
        return notes

    def _restart(self, role: Role, status: int) -> bool:
        """Restart a dead role, unless it died before and its pause is not over."""
        end = f"the end of {self.log(role)}:\n{tail(self.log(role))}"
        if status == WRONG_SETTINGS:
            raise ConfigError(f"{role.name} refuses its settings; {end}")
        if time.monotonic() - role.started_s > HEALTHY_S:
            role.restarts = 0
        if role.restarts >= MAX_RESTARTS:
            raise RoleFailed(f"{role.name} died {role.restarts + 1} times, last with {describe_exit(status)}; {end}")
        now_s = time.monotonic()
        role.dead_since_s = now_s if role.dead_since_s is None else role.dead_since_s
        if now_s - role.dead_since_s < (self.pause_s * 2 ** (role.restarts - 1) if role.restarts else 0.0):
            return False
        role.restarts, role.dead_since_s = role.restarts + 1, None
        self._spawn(role)
        return True

    def stop(self) -> None:
        """Send SIGTERM to every child in the order of their start, and SIGKILL `grace_s` seconds later."""
        if self._guardian is None:
            return
        processes = [role.process for role in self.roles if role.process is not None]
        _terminate(processes, self.grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        for process in (*processes, self._guardian):
            process.wait()
        if self._guardian.stdin:
            self._guardian.stdin.close()
        self._guardian = None

    def wait(self, role: Role | None, seconds: float = 1.0) -> None:
        """Wait until a role exits, for at most `seconds`; without a role, for exactly `seconds`."""
        if role is None or role.process is None:
            time.sleep(seconds)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            role.process.wait(seconds)

    def log(self, role: Role) -> Path:
        """File with the role's output."""
        return self.logs / f"{role.name}.log"

    def _spawn(self, role: Role) -> None:
        role.started_s = time.monotonic()
        with self.log(role).open("ab") as log:
            role.process = subprocess.Popen(
                role.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                process_group=self.group,
            )


def _terminate(processes: Sequence["subprocess.Popen[bytes]"], grace_s: float) -> None:
    """Send SIGTERM to all, and wait up to `grace_s` seconds for them to exit."""
    for process in processes:
        process.terminate()
    deadline_s = time.monotonic() + grace_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline_s - time.monotonic()))


def describe_exit(status: int) -> str:
    """An exit status in words."""
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last `lines` lines of a log."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
