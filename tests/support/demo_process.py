"""A `rollq demo` in a process of its own, and what can be seen of it from outside."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollq.monitor.report.records import METRICS_FILE, StepRecord, read_lines, read_steps
from support.waiting import wait_while_alive


class DemoProcess:
    """A demo in `folder`; its output is collected in `folder`'s neighbour `<name>.out`."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.output = folder.with_name(f"{folder.name}.out")
        command = [sys.executable, "-m", "rollq.cli.main", "demo", "--no-live", "--out", str(folder), *options]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def text(self) -> str:
        """What it has printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def metrics(self) -> list[dict[str, Any]]:
        """The trainer's lines as they were written: a step that was trained again has two."""
        return list(read_lines(self.folder / "trainer" / METRICS_FILE))

    def steps(self) -> list[StepRecord]:
        """The steps that it has trained, each once."""
        return read_steps(self.folder / "trainer" / METRICS_FILE)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Wait for something to happen while the demo runs."""
        wait_while_alive(happened, {"demo": self.process}, lambda _: self.text())

    def pids(self) -> list[int]:
        """Every living process of the demo but itself: they are known by the folder in their environment."""
        return [pid for pid in _pids() if pid != self.process.pid and str(self.folder) in _read(pid, "environ")]

    def role_pids(self, command: str) -> list[int]:
        """Processes that run `rollq <command>` in this demo."""
        words = f"\0{command}\0{self.folder}"
        return [pid for pid in self.pids() if words in _read(pid, "cmdline")]

    def ports(self) -> list[int]:
        """The server's port, once it has one."""
        return [int(port) for port in re.findall(r"redis://127\.0\.0\.1:(\d+)", self.text())]

    def kill_role(self, command: str) -> None:
        """SIGKILL to one process of a role."""
        os.kill(self.role_pids(command)[0], signal.SIGKILL)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int, name: str) -> str:
    """A file of /proc; empty when the process is gone, is a zombie, or is not ours."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
