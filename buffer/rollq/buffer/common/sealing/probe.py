"""Finds out whether this system can seal processes: a short process seals itself and checks that the seal holds."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

from rollq.buffer.common.child_processes import bare_python
from rollq.buffer.common.sealing.process import Means, address_space, allow_only_computing_with, hide_files
from rollq.buffer.errors import ConfigError

PATIENCE_S: Final = 120


@cache
def sealing_available() -> dict[Means, str]:
    """For each way to hide files, why it cannot seal a process on this system; empty if it can."""
    command = bare_python(__name__)
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        return dict.fromkeys(Means, done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
    return {Means(means): reason for means, reason in json.loads(done.stdout).items()}


def require_sealing(setting: str, remedy: str) -> None:
    """Raise `ConfigError` unless processes can be sealed here. `remedy` says, as a clause, what the user can do."""
    found = sealing_available()
    if all(found.values()):
        reasons = "; ".join(f"{means}: {reason}" for means, reason in found.items())
        raise ConfigError(f"{setting}: this system cannot seal processes ({reasons}): {remedy}")


def _try(means: Means) -> str:
    """Why a forked process cannot be sealed by these means; empty if it can."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            memory = address_space() + (1 << 28)
            hide_files([means])
            allow_only_computing_with(memory)
            answer = "".join(_holes())
        except OSError as error:
            answer = str(error)
        os.write(writing, answer.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    return answer if status == 0 else f"the process ended with status {status}"


def _holes() -> list[str]:
    """The faults in this process's seal."""
    attempts: dict[str, Callable[[], object]] = {
        "it could still read /proc": Path("/proc/self/status").read_bytes,
        "it could still make files": lambda: Path("/tmp/rollq-probe").touch(),
        "it could still open sockets": socket.socket,
        "it could still fork": lambda: os.fork() or os._exit(0),
    }
    found = []
    for hole, attempt in attempts.items():
        try:
            attempt()
        except OSError:
            continue
        found.append(hole)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps({means: _try(means) for means in Means}))
