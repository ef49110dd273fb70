"""One session with an OpenEnv server: a websocket, whose messages are answered one at a time.

Invariants: no message is sent twice, since a repeated step is a second step. A session is no longer used once an answer
was not awaited or its socket was lost. Its socket is always closed, so the server frees its place. Pings are answered
between steps, too. A server that answers no pings is gone.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import aiohttp

from rollq.environments.openenv.wire import Observation, read, write

HEARTBEAT_S: Final = 40.0
"""A ping is sent after this many seconds without a message. After half as many more, a silent server counts as gone."""
CLOSE_S: Final = 3.0
"""How long the server may take to end a session."""
CONNECT_S: Final = 10.0
MOST_BYTES: Final = 1 << 26
"""Longest message."""


class SessionLost(Exception):
    """The socket could not be opened, or was lost."""


class Session:
    """One open session."""

    def __init__(self, client: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._client = client
        self._socket = socket
        self._frames: asyncio.Queue[str | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())
        self._usable = True

    @classmethod
    async def connect(cls, url: str) -> "Session":
        """Open a socket at a server's URL. Raises `SessionLost`."""
        client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S))
        try:
            async with asyncio.timeout(2 * CONNECT_S):
                socket = await client.ws_connect(
                    f"{url.rstrip('/')}/ws",
                    heartbeat=HEARTBEAT_S,
                    max_msg_size=MOST_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
                )
            return cls(client, socket)
        except (aiohttp.ClientError, OSError) as error:
            await client.close()
            raise SessionLost(f"cannot connect: {str(error) or type(error).__name__}") from error
        except BaseException:
            await client.close()
            raise

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Observation:
        """Send a message once and wait for its answer. Raises `Refused`, `Unreadable` and `SessionLost`."""
        if not self._usable:
            raise SessionLost("the session has ended")
        self._usable = False  # until the answer arrives
        try:
            await self._socket.send_str(write(kind, data))
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            if self._frames.empty():  # otherwise the server has sent the reason
                raise SessionLost(f"the socket was lost: {error}") from error
        frame = await self._frames.get()
        if frame is None:
            raise SessionLost(f"the socket was lost: {self._how_it_ended()}")
        self._usable = self._frames.empty()  # an unrequested answer would be taken for the next answer
        return read(frame)

    async def close(self) -> None:
        """Free the place on the server, and close the socket."""
        try:
            with suppress(aiohttp.ClientError, OSError, RuntimeError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    if not self._socket.closed:
                        await self._socket.send_str(write("close"))
                    await asyncio.wait([self._reading])  # a server closes once the environment is gone
            with suppress(aiohttp.ClientError, OSError, RuntimeError):
                self._reading.cancel()
                await asyncio.wait([self._reading])
                await self._socket.close()
        finally:
            self._reading.cancel()
            await self._client.close()

    async def _read(self) -> None:
        try:
            async for message in self._socket:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break
                self._frames.put_nowait(message.data)
        finally:
            self._frames.put_nowait(None)

    def _how_it_ended(self) -> str:
        error = self._socket.exception()
        return str(error or "") or f"the server closed it, code {self._socket.close_code}"
