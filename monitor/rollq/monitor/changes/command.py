"""Runs the user's command once, with input on standard input, and kills the command after a time limit."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import IO, Any

from rollq.buffer.errors import ConfigError

LONGEST_S = 30.0
"""How long a command may run."""
POLL_S = 0.05
STANDARD_ERROR = 2


@dataclass(frozen=True, slots=True)
class Command:
    """A program and its arguments, run in `folder`. Its output goes to the file `output`, or to standard error."""

    words: tuple[str, ...]
    folder: Path
    output: Path | None = None
    longest_s: float = LONGEST_S

    @property
    def name(self) -> str:
        """The program alone: arguments may hold a secret."""
        return Path(self.words[0]).name

    def check(self) -> None:
        """Raise `ConfigError` if there is no such program."""
        program = self.words[0]
        found = shutil.which(str(self.folder / program) if os.sep in program else program)
        if found is None:
            raise ConfigError(
                f"monitor.on_change: {program!r} is not a program on the PATH of this machine; name one, with its "
                "folder if it is elsewhere"
            )

    def run(self, facts: Mapping[str, Any], stop: Event) -> str:
        """Run the command, and return its failure in words; empty if it succeeded. Setting `stop` kills it."""
        with tempfile.TemporaryFile() as given:  # unlike a pipe, a file cannot block if the command reads nothing
            given.write(json.dumps(facts, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            given.seek(0)
            try:
                with self._opened() as output:
                    process = subprocess.Popen(
                        self.words, stdin=given, stdout=output, stderr=output, cwd=self.folder, start_new_session=True
                    )
            except OSError as error:
                return f"cannot be started: {error.strerror or error}"
        return self._ended(process, stop)

    def _opened(self) -> AbstractContextManager[IO[bytes] | int]:
        return nullcontext(STANDARD_ERROR) if self.output is None else self.output.open("ab")

    def _ended(self, process: "subprocess.Popen[bytes]", stop: Event) -> str:
        deadline_s = time.monotonic() + self.longest_s
        while process.poll() is None and time.monotonic() < deadline_s and not stop.wait(POLL_S):
            pass
        if process.poll() is not None:
            return _ending(process.returncode)
        os.killpg(process.pid, signal.SIGKILL)  # including its children
        process.wait()
        return "was killed, because the watcher stops" if stop.is_set() else f"was killed after {self.longest_s:.0f} s"


def _ending(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}" if status else ""
