"""Servers of tests on loopback, in the test's process."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

STEPS = 3
"""Steps of the event loop from a connection that is accepted to its protocol."""


@asynccontextmanager
async def serving(application: web.Application, **options: Any) -> AsyncIterator[str]:
    """Serve an application on a free port; yields its URL. `options` are those of `AppRunner`.

    All connections are closed at the end. A server of asyncio that is closed while it accepts one leaves that open.
    """
    runner = web.AppRunner(application, **options)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        await web.SockSite(runner, listener).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            asyncio.get_running_loop().remove_reader(listener)
            for _ in range(STEPS):
                await asyncio.sleep(0)
            await runner.cleanup()
