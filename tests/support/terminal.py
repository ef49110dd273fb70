"""A program in a terminal of a given size, and what a person sees there."""

import os
import pty
import select
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import ioctl

import pyte

from support.waiting import PATIENCE_S, wait_until

KEYS = {"tab": b"\t", "escape": b"\x1b", "up": b"\x1b[A", "down": b"\x1b[B", "ctrl+c": b"\x03"}


class Terminal:
    """The screen of `process`; a thread keeps it up to date."""

    def __init__(self, file: int, process: "subprocess.Popen[bytes]", width: int, height: int) -> None:
        self.process = process
        self._file = file
        self._screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def text(self) -> str:
        """The lines that are shown."""
        with self._lock:
            return "\n".join(line.rstrip() for line in self._screen.display)

    def wait_for(self, *wanted: str) -> str:
        """Wait until all texts are shown; returns the screen."""
        wait_until(lambda: all(text in self.text() for text in wanted), otherwise=self.text)
        return self.text()

    def press(self, *keys: str) -> None:
        """Press keys: characters, or names of `KEYS`."""
        for key in keys:
            os.write(self._file, KEYS.get(key) or key.encode())

    def close(self) -> None:
        """Take the terminal away."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            os.close(self._file)

    def _read(self) -> None:
        while not self._closed.is_set():
            if select.select([self._file], [], [], 0.05)[0]:
                try:
                    data = os.read(self._file, 65536)
                except OSError:  # the program has ended
                    return
                with self._lock:
                    self._stream.feed(data)


@contextmanager
def terminal(command: Sequence[str], width: int, height: int) -> Iterator[Terminal]:
    """Run a program in a terminal; it must end by itself within the `with` block, or is killed at its end."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment
    ) as process:
        os.close(theirs)
        shown = Terminal(ours, process, width, height)
        try:
            yield shown
        finally:
            process.kill()
            process.wait(PATIENCE_S)
            shown.close()
