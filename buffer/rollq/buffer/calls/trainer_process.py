"""The trainer that holds a run, and whether its process is known to have ended.

A process can only be looked up on its machine and in its pid namespace. Pids are reused, so its start time identifies a
process as well. For any other process, the lease is the only evidence.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from rollq.buffer.values.places import gpus_here

_PROC = Path("/proc")
_GONE = ("Z", "X")
"""States of a process that has exited but has not been reaped yet."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The trainer of the live epoch. Its lease ends at `deadline_ms` of the server's clock, in `left_s` seconds.

    `process` is the result of `this_process` in the trainer; empty if unknown.
    """

    epoch: int
    trainer_id: str
    launch_id: str
    process: Mapping[str, str]
    deadline_ms: int
    left_s: float

    @property
    def is_here(self) -> bool:
        """Whether the trainer's process can be looked up from this process."""
        here = _namespace()
        return bool(here) and self.process.get("namespace") == here

    @property
    def has_ended(self) -> bool:
        """Whether the trainer's process is known to have ended."""
        return self.is_here and not _lives(int(self.process["pid"]), self.process["started"])

    def __str__(self) -> str:
        where = f" (process {self.process['pid']} on {self.process['host']})" if self.process else ""
        return f"trainer {self.trainer_id!r}{where}"


def this_process(launch_id: str) -> bytes:
    """Describe this process, as JSON, for any process that finds its lease. Valid only for `launch_id`."""
    pid = os.getpid()
    started = _state_and_start(pid)
    return orjson.dumps(
        {
            "launch_id": launch_id,
            "host": socket.gethostname(),
            "namespace": _namespace(),
            "pid": str(pid),
            "started": started[1] if started else "",
            "gpus": gpus_here(),
        }
    )


def process_of(described: bytes | None, launch_id: str) -> Mapping[str, str]:
    """The process that `this_process` described; empty without a description or for a different launch."""
    found: dict[str, str] = orjson.loads(described) if described else {}
    return found if found.get("launch_id") == launch_id else {}


def _lives(pid: int, started: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process belongs to another user
    found = _state_and_start(pid)
    return found is None or (found[0] not in _GONE and found[1] == started)


def _state_and_start(pid: int) -> tuple[str, str] | None:
    """A process's state, and its start in ticks since the machine started; None if these cannot be read."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    after_name = stat.rpartition(")")[2].split()
    return after_name[0], after_name[19]


def _namespace() -> str:
    """This machine's boot id and this process's pid namespace; '' if the system names neither."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""
