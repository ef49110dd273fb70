"""Child processes that write rows as JSON lines, and errors as text."""

import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, Final

from rollq.buffer.common import exact_json

MOST_SAID: Final = 20
"""How many lines of errors are kept."""


@dataclass(frozen=True, slots=True)
class RowProcess:
    """A process that runs until it has written its rows."""

    process: "subprocess.Popen[bytes]"
    _reader: threading.Thread
    _said: list[str] = field(default_factory=list)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows as they arrive. Omits a row that was cut off when the process died."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith(b"\n"):
                yield exact_json.loads(line)

    def error(self) -> str:
        """Wait for the process's end. Returns the last line of its errors, or "" after success."""
        if not self.process.wait():
            return ""
        self._reader.join(timeout=1)
        return self._said[-1] if self._said else "its process died"


@contextmanager
def row_process(command: Sequence[str], environment: Mapping[str, str], asked: bytes) -> Iterator[RowProcess]:
    """Start a process with `asked` on its standard input; leaving the context ends it."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment, **pipes) as process:  # type: ignore[call-overload]
        said: list[str] = []
        reader = threading.Thread(target=_keep, args=(process.stderr, said), daemon=True)
        reader.start()
        try:
            with suppress(BrokenPipeError):  # it has died: its errors say why
                process.stdin.write(asked)
                process.stdin.close()
            yield RowProcess(process, reader, said)
        finally:
            process.kill()
            process.wait()
            reader.join()


def _keep(lines: IO[bytes], kept: list[str]) -> None:
    with suppress(ValueError):  # the rest is not needed
        for line in lines:
            if text := line.decode(errors="replace").strip():
                kept[:] = [*kept[1 - MOST_SAID :], text]
