"""Processes for judges that need the CPU: the event loop goes on, and a call that hangs or crashes ends alone.

Arguments and results travel pickled through pipes between this process and its own children. They are what this process
made itself, from JSON and frames; no bytes that came from Redis are ever unpickled.
"""

import asyncio
import multiprocessing
from collections.abc import Callable
from typing import Any

from pebble import ProcessExpired, ProcessPool


class JudgeProcesses:
    """Up to `count` processes, started at the first call."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: Any = None

    async def call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        """What `function`, of a module's top level, returns. A process that takes longer, or is not waited for any
        more, is killed and replaced.

        Raises what it raises, `TimeoutError`, and `RuntimeError` when the process died of it.
        """
        if self._pool is None:
            self._pool = ProcessPool(self._count, context=multiprocessing.get_context("spawn"))
        future = self._pool.schedule(function, args=list(args), timeout=timeout_s)
        try:
            return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise TimeoutError(f"took longer than {timeout_s:g} s") from error
        except ProcessExpired as error:
            raise RuntimeError(f"its process died with exit code {error.exitcode}") from error

    def close(self) -> None:
        """Kill the processes."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None
