"""Sends many commands in one round trip. Commands are sent while later commands are made, and replies are decoded while
later replies arrive, so client and server work at the same time. With the driver's pipeline, which makes all commands
before it sends the first and reads all replies before it returns one, either the client or the server would be idle.
Functions with large arguments and reads of large values use this module.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import redis
from redis import exceptions as driver
from redis.backoff import NoBackoff
from redis.retry import Retry

from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.library import function_name
from rollq.buffer.store.redis_errors import diagnose
from rollq.buffer.store.redis_url import address
from rollq.buffer.store.servers import Servers

SEND_BYTES = 32 << 10
"""Smaller commands are sent together."""
REPLICA_TIMEOUT_MS = 1000
"""How long to wait for a replica before the call is repeated."""

RETRY = Retry(NoBackoff(), 1, supported_errors=(driver.ConnectionError,))
"""At once replaces a pooled connection that died unnoticed. `Servers.patiently` handles everything longer."""

log_once = LogOnce(logging.getLogger(__name__))

Command = Sequence[Any]
T = TypeVar("T")


class Transaction(NamedTuple):
    """Commands that run together, or not at all if the server refuses one. The reply is the last command's reply."""

    commands: Sequence[Command]


def pipeline(
    servers: Servers,
    patience: Patience,
    commands: Callable[[], Iterable[Command | Transaction]],
    read: Callable[[int, Any], T],
) -> list[T]:
    """Send each of `commands()` to the server that has its key, and return `read(i, reply)` for each reply.

    The reply to a refused command is its error.

    The commands must be harmless to repeat: after an outage, all are sent again. They are not atomic: other commands
    may come between, and later commands run even if an earlier command is refused. If servers have replicas, the call
    returns once everything that its functions have found or written, and everything that it has set, is on a replica
    too, so that no failover undoes an answer.
    """

    def do() -> list[T]:
        connections = _Connections(servers)
        try:
            talk = partial(_exchange, connections, commands, read)
            replies: list[T] = RETRY.call_with_retry(talk, lambda _: connections.disconnect())
        except BaseException:
            connections.disconnect()  # replies that nobody waits for may be on their way
            raise
        finally:
            connections.release()
        return replies

    return servers.patiently(do, patience)


class _Connection:
    """One connection, which collects commands so that sending needs few system calls. `written` is the key of the last
    command that may have written, or None. `mark` is the key of the last function.
    """

    def __init__(self, client: redis.Redis, connection: Any) -> None:
        self.client = client
        self.raw = connection
        self.written: str | None = None
        self.mark: str | None = None
        self._packed: list[bytes] = []
        self._size_bytes = 0

    def send(self, command: Command) -> None:
        for piece in _pack(self.raw, command):
            if len(piece) >= SEND_BYTES:
                self.flush()
                self.raw.send_packed_command([piece])  # without a copy
            else:
                self._packed.append(piece)
                self._size_bytes += len(piece)
                if self._size_bytes >= SEND_BYTES:
                    self.flush()

    def flush(self) -> None:
        if self._packed:
            self.raw.send_packed_command([b"".join(self._packed)])
        self._packed, self._size_bytes = [], 0

    def disconnect(self) -> None:
        """Begin again with a new connection."""
        self._packed, self._size_bytes = [], 0
        self.raw.disconnect()


class _Connections:
    """A connection to each server that has a key, taken from the server's pool when first needed."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._by_server: dict[redis.Redis, _Connection] = {}

    def of(self, key: str) -> _Connection:
        client = self._servers.of(key)
        if client not in self._by_server:
            self._by_server[client] = _Connection(client, client.connection_pool.get_connection())
        return self._by_server[client]

    def flush(self) -> None:
        """Send the gathered commands, and ask for replicas where something may have been written."""
        for connection in self._by_server.values():
            if connection.written and self._servers.replicas:
                # WAIT counts only writes of this connection, and a repeated function may write nothing. `mark` always
                # writes, even if memory is full
                if connection.mark:
                    connection.send(("FCALL", function_name("mark"), 1, connection.mark))
                timeout_ms = 1 if self._servers.was_alone(connection.client) else REPLICA_TIMEOUT_MS
                connection.send(("WAIT", self._servers.replicas, timeout_ms))
            connection.flush()

    def confirm(self) -> None:
        """Read the replies about replicas. Raises the driver's error if a server's replicas lack the data.

        A primary that has no replica left, as after a failover, needs none, so that the run continues.
        """
        for connection in self._by_server.values():
            if connection.written and self._servers.replicas:
                if connection.mark:  # without the functions, the reply is an error, as are the replies to the calls
                    _read(connection.raw)
                count = _read(connection.raw)  # an error if the server has become a replica
                if isinstance(count, int) and count >= self._servers.replicas:
                    continue
                has_replicas = _has_replicas(connection.raw)
                if not self._servers.is_alone(connection.client, connection.written, has_replicas=has_replicas):
                    raise driver.ResponseError("NOREPLICAS no replica has the data yet")
                name = address(connection.client)
                log_once.warning(name, "%s has no replica: its data is on its own disk alone; add a replica", name)

    def disconnect(self) -> None:
        for connection in self._by_server.values():
            connection.disconnect()

    def release(self) -> None:
        for connection in self._by_server.values():
            connection.client.connection_pool.release(connection.raw)


def _exchange(
    connections: _Connections, commands: Callable[[], Iterable[Command | Transaction]], read: Callable[[int, Any], T]
) -> list[T]:
    sent: list[tuple[_Connection, int]] = []  # for each command: its connection, and the replies before its own
    for command in commands():
        parts = command.commands if isinstance(command, Transaction) else [command]
        connection = connections.of(key_of(parts[0]))
        if isinstance(command, Transaction):
            parts = [("MULTI",), *parts, ("EXEC",)]
        for part in parts:
            connection.send(part)
            if part[0] in ("FCALL", "SET"):
                connection.written = key_of(part)
            if part[0] == "FCALL":
                connection.mark = key_of(part)
        sent.append((connection, len(parts) - 1))
    connections.flush()
    replies = [read(index, _reply(connection.raw, before)) for index, (connection, before) in enumerate(sent)]
    connections.confirm()
    return replies


def key_of(command: Command) -> str:
    """The key that decides which server a command goes to."""
    match command[0]:
        case "FCALL" | "FCALL_RO":
            at = 3
        case "XREAD":
            at = command.index("STREAMS") + 1
        case _:
            at = 1
    return str(command[at])


def _has_replicas(connection: Any) -> bool:
    """Whether a replica follows the server; true, too, if the server has become a replica itself."""
    connection.send_command("INFO", "replication")
    return not {b"role:master", b"connected_slaves:0"} <= set(connection.read_response().splitlines())


def _pack(connection: Any, command: Command) -> Iterable[bytes]:
    """A command's bytes, without the copies of large arguments that the driver's packing would make."""
    if not any(isinstance(arg, bytes) and len(arg) >= SEND_BYTES for arg in command):
        packed: Iterable[bytes] = connection.pack_command(*command)
        return packed
    args = [connection.encoder.encode(arg) for arg in command]
    pieces = ((b"$%d\r\n" % len(arg), arg, b"\r\n") for arg in args)
    return [b"*%d\r\n" % len(args), *chain.from_iterable(pieces)]


def _reply(connection: Any, queued: int) -> Any:
    """The reply to a command. The reply to a transaction follows `queued` replies, from MULTI and its queued
    commands."""
    replies = [_read(connection) for _ in range(queued + 1)]
    refused = [reply for reply in replies if isinstance(reply, Exception)]
    if refused or not queued:
        return (refused or replies)[0]
    return _known(replies[-1][-1])


def _read(connection: Any) -> Any:
    try:
        return connection.read_response()
    except driver.ResponseError as error:
        return _known(error)


def _known(reply: Any) -> Any:
    """Return a command's reply, but raise an error about the server."""
    if isinstance(reply, driver.ResponseError) and diagnose(reply):
        raise reply
    return reply
