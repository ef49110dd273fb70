"""A time limit on making an environment's rows, and progress reports."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeLimit:
    """A limit in seconds. `is_over` says whether the limit has ended a process."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.is_over = False

    @contextmanager
    def on(self, process: "subprocess.Popen[bytes]") -> Iterator[None]:
        """Kill the process if this block takes longer than the limit."""

        def end() -> None:
            self.is_over = True
            process.kill()

        timer = threading.Timer(self._limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


@contextmanager
def every(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Call a function repeatedly, in a thread, until the block ends."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
