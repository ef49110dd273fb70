"""Many commands in one round trip: sent while the next are being made, read while the last replies arrive.

Client and server so work at the same time, which a pipeline that packs everything, sends it, and only then reads does
not. Functions with large arguments and reads of large values go this way.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import redis
from redis import exceptions as driver

from rollq.buffer.store.connection import Patience, patiently
from rollq.buffer.store.redis_errors import diagnose

SEND_BYTES = 32 << 10
"""Smaller commands are sent together."""

Command = Sequence[Any]
T = TypeVar("T")


class Transaction(NamedTuple):
    """Commands that run together, or not at all when the server refuses one of them. Its reply is that of the last."""

    commands: Sequence[Command]


def pipeline(
    client: redis.Redis,
    patience: Patience,
    commands: Callable[[], Iterable[Command | Transaction]],
    read: Callable[[int, Any], T],
) -> list[T]:
    """Send `commands()`, and return `read(i, reply)` of each one's reply; that of a refused command is its error.

    Must be harmless to repeat: after an outage all starts again. Nothing holds the commands together: others may come
    between, and later ones run when an earlier one is refused.
    """

    def do() -> list[T]:
        pool = client.connection_pool
        connection: Any = pool.get_connection()
        try:
            talk = partial(_exchange, connection, commands, read)
            replies: list[T] = connection.retry.call_with_retry(talk, lambda _: connection.disconnect())
        except BaseException:
            connection.disconnect()  # replies may be on their way that nobody waits for
            raise
        finally:
            pool.release(connection)
        return replies

    return patiently(client, do, patience)


def _exchange(
    connection: Any, commands: Callable[[], Iterable[Command | Transaction]], read: Callable[[int, Any], T]
) -> list[T]:
    queued: list[int] = []  # of each command, the replies that come before its own
    packed: list[bytes] = []
    size_bytes = 0

    def flush() -> None:
        nonlocal packed, size_bytes
        if packed:
            connection.send_packed_command([b"".join(packed)])  # few system calls
        packed, size_bytes = [], 0

    for command in commands():
        parts = [("MULTI",), *command.commands, ("EXEC",)] if isinstance(command, Transaction) else [command]
        queued.append(len(parts) - 1)
        for piece in chain.from_iterable(_pack(connection, part) for part in parts):
            if len(piece) >= SEND_BYTES:
                flush()
                connection.send_packed_command([piece])  # not copied
            else:
                packed.append(piece)
                size_bytes += len(piece)
                if size_bytes >= SEND_BYTES:
                    flush()
    flush()
    return [read(index, _reply(connection, before)) for index, before in enumerate(queued)]


def _pack(connection: Any, command: Command) -> Iterable[bytes]:
    """The bytes of a command, with large arguments as they are: the driver's own packing copies them."""
    if not any(isinstance(arg, bytes) and len(arg) >= SEND_BYTES for arg in command):
        packed: Iterable[bytes] = connection.pack_command(*command)
        return packed
    args = [connection.encoder.encode(arg) for arg in command]
    pieces = ((b"$%d\r\n" % len(arg), arg, b"\r\n") for arg in args)
    return [b"*%d\r\n" % len(args), *chain.from_iterable(pieces)]


def _reply(connection: Any, queued: int) -> Any:
    """The reply of a command; that of a transaction comes after its `queued` commands were taken."""
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
    """The reply of a command; trouble of the server is raised instead."""
    if isinstance(reply, driver.ResponseError) and diagnose(reply):
        raise reply
    return reply
