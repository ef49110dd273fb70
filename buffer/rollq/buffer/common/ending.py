"""Ends asyncio tasks."""

import asyncio
from collections.abc import Iterable
from typing import Any


async def cancel(tasks: "Iterable[asyncio.Future[Any]]", timeout_s: float | None = None) -> None:
    """Cancel the tasks that are still running, and wait until they have ended, for at most `timeout_s`."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=timeout_s)
