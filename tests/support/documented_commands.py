"""Pages as something to run: their code blocks, and terminals to run them in.

A comment before a block says what to do with it. `terminals`: each line gets a terminal; `terminal: NAME`: the block
gets one, in the folder NAME; `file: PATH`: the content of this file; `redis-cli`: needs that program; `elsewhere: WHY`:
not run. A block without a comment is run unchanged.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rollq.monitor.report.records import read_steps
from support.waiting import PATIENCE_S, wait_while_alive

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^:>]+?)(?:: (?P<detail>.+?))? -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One block of code; `mark` and `detail` come from the comment before it, and are empty without one."""

    language: str
    code: str
    mark: str
    detail: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    found = BLOCK.finditer(page.read_text("utf-8"))
    return [Block(m["language"], m["code"], m["mark"] or "", m["detail"] or "") for m in found]


def files(page: Path) -> dict[str, str]:
    """The files that a page shows: path to content."""
    return {block.detail: block.code for block in blocks(page) if block.mark == "file"}


def code_with(page: Path, words: str) -> str:
    """The only block of a page that is run unchanged and contains `words`."""
    (code,) = [block.code for block in blocks(page) if block.mark == "" and words in block.code]
    return code


def terminals(page: Path) -> list[str]:
    """The commands of a page that get a terminal each."""
    (lines,) = [block.code.splitlines() for block in blocks(page) if block.mark == "terminals"]
    return lines


def steps_trained(metrics: Path) -> int:
    """Train steps that a trainer has recorded in its `metrics.jsonl`."""
    return len(read_steps(metrics)) if metrics.exists() else 0


@dataclass
class Desk:
    """A folder, a free port instead of 6379, and terminals that close with the `with` block."""

    folder: Path
    port: int
    terminals: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for terminal in self.terminals.values():
            kill(terminal)

    def local(self, code: str) -> str:
        """`code` for this machine and a test: our address and port, and fewer steps."""
        code = code.replace("10.0.0.1", "127.0.0.1").replace("6379", str(self.port))
        code = code.replace("rollq redis ", f"rollq redis --port {self.port} ")
        code = code.replace("redis-cli ", f"redis-cli -p {self.port} ")
        return code.replace("step == 20", "step == 3")

    def run(self, code: str) -> str:
        """Run shell code to its end, and return its output. It must succeed."""
        done = subprocess.run(
            ["/bin/sh", "-e", "-c", self.local(code)],
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}"
        return done.stdout

    def open(self, name: str, code: str, folder: str = ".") -> None:
        """Run shell code in a new terminal."""
        with self.log(name).open("ab") as log:
            self.terminals[name] = subprocess.Popen(
                ["/bin/sh", "-e", "-c", self.local(code)],
                cwd=self.folder / folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        """What the terminal shows."""
        return self.folder / f"{name}.log"

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Wait while no terminal ends."""
        wait_while_alive(happened, self.terminals, lambda name: self.log(name).read_text())

    def interrupt(self, name: str) -> None:
        """Ctrl-C."""
        os.killpg(self.terminals[name].pid, signal.SIGINT)
        self.terminals[name].wait(PATIENCE_S)


def kill(terminal: "subprocess.Popen[bytes]") -> None:
    """End everything in a terminal, with SIGKILL."""
    if terminal.poll() is None:
        os.killpg(terminal.pid, signal.SIGKILL)
    terminal.wait()


def environment() -> dict[str, str]:
    """Ours, without settings of rollq, and with its command on the PATH."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("ROLLQ_")}
    return given | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
