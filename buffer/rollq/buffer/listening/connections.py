"""A server's connections: how many an address or a token may have, for how long, and which connection to close for
another.

Invariant: a connection with a valid token is closed for another only while its token has more than `most_of_token`
connections. Connections without a token are closed for each other, first from the address with the most connections.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from time import monotonic
from typing import Final, NamedTuple

from rollq.buffer.common.once_a_minute import OnceAMinute
from rollq.buffer.listening.limits import ConnectionLimits

log = logging.getLogger(__name__)


class State(IntEnum):
    """A connection's states, in the order in which connections are closed to make room."""

    WAITING = 0
    """The client has not sent a complete request."""
    STREAMING = 1
    """The client gets an endless answer."""
    ANSWERING = 2


STRANGER_S: Final = {State.WAITING: 15.0, State.STREAMING: math.inf, State.ANSWERING: 120.0}
"""How long a connection without a token may be in a state."""
KNOWN_S: Final = {State.WAITING: 90.0, State.STREAMING: math.inf, State.ANSWERING: math.inf}


class Party(NamedTuple):
    """A connection's owner: a token or an address."""

    name: Hashable
    has_token: bool


@dataclass(slots=True, eq=False)
class Connection:
    """One connection."""

    party: Party
    address: str
    since_s: float
    state: State = State.WAITING
    is_closed: bool = False
    transport: asyncio.Transport | None = None

    def close(self) -> None:
        """Close the connection at once."""
        self.is_closed = True
        if self.transport is not None:
            self.transport.abort()

    def opened(self, transport: asyncio.Transport) -> None:
        """Set the transport, which arrives after the connection was admitted."""
        self.transport = transport
        if self.is_closed:
            transport.abort()


@dataclass(slots=True, eq=False)
class Connections:
    """All connections of a server."""

    limits: ConnectionLimits
    clock: Callable[[], float] = monotonic
    _parties: dict[Party, set[Connection]] = field(default_factory=dict)
    _count: int = 0
    _refused: OnceAMinute = field(init=False)
    _evicted: OnceAMinute = field(init=False)

    def __post_init__(self) -> None:
        self._refused, self._evicted = OnceAMinute(self.clock), OnceAMinute(self.clock)

    def __len__(self) -> int:
        return self._count

    def admit(self, address: str) -> Connection | None:
        """Admit a new connection from an address, closing another if needed; returns None to refuse it."""
        party = Party(address, has_token=False)
        if len(self._parties.get(party, ())) >= self.limits.most_of_address:
            self._evict(party)
        elif self._count >= self.limits.most:
            crowd = most_crowded({party: len(held) for party, held in self._parties.items()}, self.limits)
            if crowd is None:
                self._log_refusal()
                return None
            self._evict(crowd)
        connection = Connection(party, address, self.clock())
        self._add(connection)
        return connection

    def discard(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        held = self._parties.get(connection.party, set())
        if connection in held:
            held.remove(connection)
            self._count -= 1
        if not held:
            self._parties.pop(connection.party, None)

    def move(self, connection: Connection, party: Party) -> None:
        """Count a connection for a different party."""
        if not connection.is_closed and party != connection.party:
            self.discard(connection)
            connection.party = party
            self._add(connection)

    def enter(self, connection: Connection, state: State) -> None:
        """Record a connection's new state."""
        connection.state, connection.since_s = state, self.clock()

    def close_late(self) -> None:
        """Close connections that have been in their state for too long."""
        now_s = self.clock()
        for connection in [connection for held in self._parties.values() for connection in held]:
            limits_s = KNOWN_S if connection.party.has_token else STRANGER_S
            if now_s - connection.since_s > limits_s[connection.state]:
                self.discard(connection)
                connection.close()

    def _add(self, connection: Connection) -> None:
        self._parties.setdefault(connection.party, set()).add(connection)
        self._count += 1

    def _evict(self, party: Party) -> None:
        oldest = min(self._parties[party], key=lambda held: (held.state, held.since_s))
        self.discard(oldest)
        oldest.close()
        if count := self._evicted.count():
            log.warning(
                "connections closed to make room since the last such message: %d, the latest from %s; the limit is "
                "%d in all, and %d from an address without a token",
                count,
                oldest.address,
                self.limits.most,
                self.limits.most_of_address,
            )

    def _log_refusal(self) -> None:
        if count := self._refused.count():
            log.warning(
                "connections refused since the last such message: %d; all %d accepted ones have a token; raise the "
                "limit with `ulimit -n`",
                count,
                self.limits.most,
            )


def most_crowded(held: dict[Party, int], limits: ConnectionLimits) -> Party | None:
    """The party that must make room: the address with the most connections, or, without addresses, the token with the
    most connections if it has more than `most_of_token`; else None. Pure."""
    strangers = [party for party in held if not party.has_token]
    crowded = strangers or [party for party, count in held.items() if count > limits.most_of_token]
    return max(crowded, key=held.__getitem__, default=None)


_current: ContextVar[tuple[Connections, Connection] | None] = ContextVar("current connection", default=None)
"""The current request's connection."""


def enter_connection(connections: Connections, connection: Connection) -> None:
    """Make a connection this context's current connection."""
    _current.set((connections, connection))


def note(state: State) -> None:
    """Record the current connection's new state."""
    if (current := _current.get()) is not None:
        connections, connection = current
        connections.enter(connection, state)


def identify(token: Hashable | None) -> None:
    """Count the current connection for a valid token, or for its address if None."""
    if (current := _current.get()) is not None:
        connections, connection = current
        party = Party(connection.address, has_token=False) if token is None else Party(token, has_token=True)
        connections.move(connection, party)
