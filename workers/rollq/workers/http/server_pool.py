"""Pools of equivalent servers. Each request goes to the least loaded server, and is retried if that may help.

The two pools differ in how a failed server comes back. A `JsonCaller` leaves the server out for a while; the engine's
pool (`rollq.workers.engines.openai.servers`) leaves it out until the server passes all checks.
"""

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, NoReturn, TypeVar

import aiohttp

from rollq.workers.http.client import TransientError, Unanswered, exchange, open_session
from rollq.workers.http.retries import RetryPolicy, backoff_s, growing_pause_s

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PooledServer:
    """One server in a pool, the number of its requests, and the time (monotonic) of its last sign of life. `tries`
    holds the requests' time limits, through which requests can be withdrawn."""

    url: str
    in_flight: int = 0
    heard_s: float = 0.0
    tries: set[asyncio.Timeout] = field(default_factory=set)

    def heard(self) -> None:
        """Note that the server has sent something."""
        self.heard_s = monotonic()

    def leave(self) -> None:
        """Make all of the server's requests try another server."""
        tries, self.tries = self.tries, set()
        for limit in tries:
            limit.reschedule(0)


S = TypeVar("S", bound=PooledServer)


class ServerPool(ABC, Generic[S]):
    """Servers behind one retry loop. Subclasses choose the next server and handle its failures."""

    def __init__(self, servers: Sequence[S], policy: RetryPolicy) -> None:
        self.servers = servers
        self.policy = policy

    async def send(self, ask: Callable[[S], Awaitable[T]], session: str | None = None) -> T:
        """Return the result of `ask` with a server, after as many tries as the policy allows.

        A failed try is repeated immediately if another server may serve it, otherwise after a pause. If a silent server
        does not answer a try in time, all its other requests leave it too. One `session`'s requests prefer the same
        server. Raises the exceptions of `ask`, and the error from `give_up` after the last try.
        """
        failures, failed = 0, None
        while True:
            server, started_s = self.choose(session, failed), monotonic()
            server.in_flight += 1
            try:
                return await _try(server, ask)
            except TransientError as error:
                failures, failed = failures + 1, server
                pause_s = backoff_s(self.policy, failures, error.retry_after_s, random.random())
                if pause_s is None:
                    await self.give_up(server, failures, error)
                retry_now = self.eject(server, error)
                if retry_now and isinstance(error, Unanswered) and server.heard_s < started_s:
                    server.leave()
                log.debug("try %d at %s failed: %s", failures, server.url, error)
            finally:
                server.in_flight -= 1
            if not retry_now:
                await asyncio.sleep(pause_s)

    @abstractmethod
    def choose(self, session: str | None, failed: S | None) -> S:
        """The server for the next try. `failed` is the server of the previous try."""

    @abstractmethod
    def eject(self, server: S, error: TransientError) -> bool:
        """Leave out a server that failed. Returns whether another server is available for an immediate retry."""

    @abstractmethod
    async def give_up(self, server: S, failures: int, error: TransientError) -> NoReturn:
        """Raise the error of a request whose last try failed."""


async def _try(server: PooledServer, ask: Callable[[Any], Awaitable[T]]) -> T:
    """The result of `ask`. Raises `TransientError` when requests leave the server during the call."""
    try:
        async with asyncio.timeout(None) as limit:
            server.tries.add(limit)
            try:
                return await ask(server)
            finally:
                server.tries.discard(limit)
    except TimeoutError as error:
        raise TransientError("it does not answer other requests") from error


@dataclass(slots=True, eq=False)
class _RestingServer(PooledServer):
    """A server with its number of consecutive `failures`, and the time (monotonic) until which it is left out."""

    slots: asyncio.Semaphore = field(kw_only=True)
    failures: int = 0
    out_until_s: float = 0.0

    @property
    def out(self) -> bool:
        """Whether the server is left out now."""
        return self.out_until_s > monotonic()

    @property
    def tested(self) -> bool:
        """Whether this server has a trial request after a failure."""
        return self.failures > 0 and self.in_flight > 0


class JsonCaller(ServerPool[_RestingServer]):
    """Posts JSON to servers, with at most `concurrent` requests to each at a time.

    A failed server is left out for a while, longer each time, and then gets one request at a time until it has answered
    a request. A request waits before its next try only when all servers are left out; after the wait it is sent anyway.
    """

    def __init__(
        self, urls: Sequence[str], policy: RetryPolicy, timeout_s: float, concurrent: int, key: str | None = None
    ) -> None:
        super().__init__([_RestingServer(url.rstrip("/"), slots=asyncio.Semaphore(concurrent)) for url in urls], policy)
        self._timeout_s = timeout_s
        self._key = key
        self._http: aiohttp.ClientSession | None = None

    async def post(self, body: Mapping[str, Any], path: str = "") -> Any:
        """Post `body` and return the answer.

        Raises `ValueError` with the server's message for a refusal, and `TransientError` when all tries failed.
        """
        http = self._http = self._http or open_session(self._timeout_s, self._key)

        async def ask(server: _RestingServer) -> Any:
            async with server.slots:
                answer = await exchange(http, "POST", server.url + path, body)
            server.failures = 0
            server.heard()
            return answer

        return await self.send(ask)

    def choose(self, session: str | None, failed: _RestingServer | None) -> _RestingServer:
        """The least loaded server that is not left out, otherwise the least loaded of all servers."""
        return min(self.servers, key=lambda server: (server.out, server.tested, server.in_flight))

    def eject(self, server: _RestingServer, error: TransientError) -> bool:
        """See `ServerPool.eject`. Requests that fail together count as one failure."""
        if not server.out:
            server.failures += 1
            pause_s = growing_pause_s(self.policy, server.failures, error.retry_after_s, random.random())
            server.out_until_s = monotonic() + pause_s
        return not all(server.out for server in self.servers)

    async def give_up(self, server: _RestingServer, failures: int, error: TransientError) -> NoReturn:
        """Raise `TransientError`."""
        self.eject(server, error)
        raise TransientError(f"{server.url} failed {failures} times; last error: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None
