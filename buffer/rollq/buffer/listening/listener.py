"""Accepts connections within limits, for any server that is an asyncio protocol."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextvars import copy_context
from typing import Final

from rollq.buffer.common.once_a_minute import OnceAMinute
from rollq.buffer.listening.connections import Connection, Connections, enter_connection
from rollq.buffer.listening.limits import address_of

log = logging.getLogger(__name__)

BACKLOG: Final = 1024
"""Connections that the kernel queues until they are accepted."""
AT_ONCE: Final = 16
"""Connections to accept before other tasks get a turn; far fewer than the reserved files."""
RETRY_S: Final = 1.0
"""Pause after a connection could not be accepted."""
SWEEP_S: Final = 1.0


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address. Port 0 means a free port. Raises `OSError`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError):
        listener.close()
        raise
    return listener


class Listener:
    """Passes a socket's connections to protocols until it is closed. Use each listener in one event loop."""

    def __init__(
        self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol], connections: Connections
    ) -> None:
        self._socket, self._make_protocol, self._connections = listener, make_protocol, connections
        self._failed = OnceAMinute()
        self._opening: set[asyncio.Task[object]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def start(self) -> None:
        """Accept connections."""
        self._socket.setblocking(False)
        self._accept_again()
        self._sweep()

    async def close(self) -> None:
        """Stop accepting connections and close the socket; accepted connections stay open."""
        asyncio.get_running_loop().remove_reader(self._socket)
        for timer in self._timers.values():
            timer.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        self._socket.close()

    def _accept_again(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _sweep(self) -> None:
        self._connections.close_late()
        self._timers["sweep"] = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, peer = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            connection = self._connections.admit(address_of(peer))
            if connection is None:
                accepted.close()
            else:
                self._open(accepted, connection)

    def _pause(self, error: OSError) -> None:
        """Leave connections to the kernel for a moment, since accepting fails for lack of files or memory."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        self._timers["accept"] = loop.call_later(RETRY_S, self._accept_again)
        if count := self._failed.count():
            log.error(
                "connections that could not be accepted since the last such message: %d: %s", count, error.strerror
            )

    def _open(self, accepted: socket.socket, connection: Connection) -> None:
        accepted.setblocking(False)
        loop = asyncio.get_running_loop()
        opened = loop.connect_accepted_socket(
            lambda: _Limited(self._make_protocol(), self._connections, connection), accepted
        )
        task: asyncio.Task[object] = loop.create_task(opened)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)


class _Limited(asyncio.Protocol):
    """Passes everything to a protocol, with its connection as the context's current connection."""

    def __init__(self, inner: asyncio.Protocol, connections: Connections, connection: Connection) -> None:
        self._inner, self._connections, self._connection = inner, connections, connection
        self._context = copy_context()
        self._context.run(enter_connection, connections, connection)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._context.run(self._inner.connection_made, transport)
        self._connection.opened(transport)

    def data_received(self, data: bytes) -> None:
        self._context.run(self._inner.data_received, data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self._connection)
        self._connection.is_closed = True
        self._inner.connection_lost(exc)
