"""Marks the processes that vLLM starts, and ends them when the worker ends or is killed.

Invariant: marked processes outlive the worker, and the engine that started them, by seconds at most. The worker ends
marked processes when an engine is closed or cannot start. The watchdog ends them when the worker has died.
"""

import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rollq.workers.engines.vllm import watchdog

log = logging.getLogger(__name__)


class ProcessGuard:
    """The processes of one engine. Needs Linux, and does nothing elsewhere."""

    def __init__(self) -> None:
        """Starts the watchdog, which needs 10 MB of memory. Signals to the worker's process group do not reach the
        watchdog."""
        self.mark = f"rollq-engine-{secrets.token_hex(8)}"
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._memory: set[str] = set()
        if sys.platform == "linux":
            self._watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", watchdog.__file__, str(os.getpid()), self.mark],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )

    @contextmanager
    def marking(self, **environment: str) -> Iterator[None]:
        """Mark the processes that start within the block, in any thread, and all processes that they start later.

        `environment` has variables for these processes only. Variables that are already set keep their values.
        """
        if self._watchdog is None:
            yield
            return
        file = os.memfd_create(self.mark)  # exec closes it, so only forks have it
        added = {name: value for name, value in environment.items() if name not in os.environ}
        added[watchdog.VARIABLE] = self.mark
        os.environ.update(added)
        try:
            yield
        finally:
            self._memory = watchdog.shared_memory(watchdog.marked(self.mark))
            for name in added:
                os.environ.pop(name, None)
            os.close(file)

    def end_processes(self) -> None:
        """End the marked processes; blocks for seconds."""
        left = watchdog.end_marked(self.mark, self._memory) if self._watchdog is not None else set()
        if left:
            log.error("processes of the engine do not end, although killed: %s", sorted(left))

    def close(self) -> None:
        """End the marked processes and the watchdog; blocks for seconds."""
        self.end_processes()
        watching, self._watchdog = self._watchdog, None
        if watching is not None:
            watching.kill()
            watching.wait()
