"""A relay of TCP connections that can freeze: both ends stay open, and nothing arrives any more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class FrozenRelay:
    """Forwards to `port` of this machine until it is frozen."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._running = asyncio.Event()
        self._running.set()
        self._writers: list[asyncio.StreamWriter] = []
        self.port = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["FrozenRelay"]:
        """Serve in this event loop."""
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for writer in self._writers:
                writer.transport.abort()

    def freeze(self) -> None:
        """Forward nothing from now on."""
        self._running.clear()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, far_writer]
        await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._running.wait()
                writer.write(data)
                await writer.drain()
            await self._running.wait()
            writer.close()
