"""A `rollq up` in a process, and what can be seen of it from outside."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rollq.buffer.common.ports import free_port
from rollq.monitor.report.records import METRICS_FILE, read_steps
from support.waiting import PATIENCE_S, wait_while_alive

MARK = "ROLLQ_TEST_FOLDER"
"""Name of a variable in the environment of every process that this one has started."""


class UpProcess:
    """`rollq up` on a copy of a prepared folder, with a port that is free and `changes` of its settings' text."""

    def __init__(self, prepared: Path, folder: Path, *options: str, **changes: str) -> None:
        self.folder, self.port = folder, free_port("127.0.0.1")
        shutil.copytree(prepared, folder)
        self.file = folder / "rollq.toml"
        text = self.file.read_text("utf-8").replace(":6379", f":{self.port}")
        for before, after in changes.items():
            assert before in text
            text = text.replace(before, after)
        self.file.write_text(text, "utf-8")
        self.output = folder.with_name(f"{folder.name}.out")
        self.options = options

    def start(self) -> "subprocess.Popen[bytes]":
        """Start it, in a process group like that of a terminal's command."""
        command = [sys.executable, "-m", "rollq.cli.main", "up", str(self.file), *self.options]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, MARK: str(self.folder)},
            )
        return self.process

    def end(self) -> int:
        """Wait for its end; returns the exit status."""
        return self.process.wait(PATIENCE_S)

    def text(self) -> str:
        """What it has printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def steps(self) -> int:
        """How many steps its trainer has trained."""
        return len(read_steps(self.folder / "trainer" / METRICS_FILE))

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Wait for something to happen while it runs."""
        wait_while_alive(happened, {"up": self.process}, lambda _: self.text())

    def pids(self, word: str = "") -> list[int]:
        """Every living process that it has started, with `word` among its arguments if given."""
        mark = f"{MARK}={self.folder}"
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [
            pid
            for pid in pids
            if pid != self.process.pid and mark in _read(pid, "environ") and (not word or word in _words(pid))
        ]

    def kill(self, role: str) -> None:
        """SIGKILL to one process of a role, by the name of its command."""
        os.kill(self.pids(role)[0], signal.SIGKILL)


def _words(pid: int) -> list[str]:
    return _read(pid, "cmdline").split("\0")


def _read(pid: int, name: str) -> str:
    """A file of /proc; empty when the process is gone, is a zombie, or is not ours."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
