"""One model's servers: which one gets a request, and how servers join, fail and rejoin.

Invariant: a server gets requests only if it has answered the simplest request correctly since its last failure, and
agrees with the other servers, so a server restarted with old weights stays out. The last server is never ejected: the
caller handles its failures. While no server serves, requests go to all servers.

If weights are pushed, a server gets requests only with the wanted weights. Since a server may have been restarted, it
is asked for its weights' name before the first request after a failure or idle time.

A server that has loaded weights or rejoins must return the live weights' logprobs; see `LiveWeights`.
"""

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from time import monotonic
from typing import Any, NoReturn

import aiohttp

from rollq.buffer.errors import RollqError, WeightsError
from rollq.buffer.weights.probe import Probe
from rollq.workers.engines.openai.dialect import Dialect, Weights
from rollq.workers.engines.openai.live_weights import LiveWeights
from rollq.workers.engines.openai.server import Server, ServerState, WrongWeights
from rollq.workers.engines.openai.tokens import Tokens
from rollq.workers.engines.protocol import EngineDead
from rollq.workers.http.client import TransientError, open_session
from rollq.workers.http.retries import RetryPolicy, growing_pause_s
from rollq.workers.http.server_pool import ServerPool

log = logging.getLogger(__name__)

SESSIONS = 10_000
"""The largest number of conversations that keep their server."""


class RequestFailed(RollqError, RuntimeError):
    """A request failed at every try, while the servers answer other requests."""


class _Sessions:
    """Maps conversations to servers, and forgets the oldest conversations."""

    def __init__(self) -> None:
        self._servers: OrderedDict[str, Server] = OrderedDict()

    def get(self, session: str | None) -> Server | None:
        return None if session is None else self._servers.get(session)

    def set(self, session: str | None, server: Server) -> None:
        if session is None:
            return
        self._servers[session] = server
        self._servers.move_to_end(session)
        if len(self._servers) > SESSIONS:
            self._servers.popitem(last=False)


class Servers(ServerPool[Server]):
    """Sends each request to the server of its conversation, otherwise to the least loaded server."""

    def __init__(
        self, dialect: Dialect, urls: Sequence[str], model: str | None, policy: RetryPolicy, *, pushes: bool
    ) -> None:
        """With `pushes`, `serve` loads weights into the servers."""
        super().__init__([Server(url.rstrip("/"), dialect=dialect) for url in urls], policy)
        self._routes = dialect.weights
        self._pushes = pushes
        self._live = LiveWeights()
        self._wanted_model = model
        self._sessions = _Sessions()
        self._joining: dict[asyncio.Task[None], Server] = {}
        self._comparing = asyncio.Lock()
        self._http: aiohttp.ClientSession | None = None

    @property
    def context_tokens(self) -> int:
        """The smallest context, in tokens, among the servers that have joined."""
        return min(server.context_tokens for server in self.servers)

    @property
    def max_sequences(self) -> int:
        """The total number of sequences that the serving servers run at a time. While no server serves, the number for
        one server."""
        serving = self.serving or self.servers[:1]
        return sum(server.max_sequences for server in serving)

    @property
    def serving(self) -> list[Server]:
        """The servers that get requests."""
        return [server for server in self.servers if server.serving]

    async def start(self, timeout_s: float, key: str | None) -> None:
        """Wait until the first server serves; the others join when they are ready. `timeout_s` bounds each request.

        Raises `ValueError` if no server is fit for training.
        """
        self._http = open_session(timeout_s, key)
        await self._first_serving([self._start_joining(server) for server in self.servers])

    async def check(self, weights: Weights) -> None:
        """Raise `WeightsError` unless a server can read `weights`."""
        refusals = []
        for server in self.serving or self.servers:
            try:
                return await self._routes.check(self._session(), server.url, weights)
            except (TransientError, ValueError) as error:
                refusals.append(f"{server.url}: {error}")
        raise WeightsError(
            f"no server can load weights {str(weights.folder)!r}: {'; '.join(refusals)}. They must be in a folder that "
            f"every server sees under the same path; {self._routes.NEEDED}"
        )

    async def serve(self, weights: Weights | None, probe: Probe | None) -> None:
        """Load `weights`, unless None, into all servers, and check the servers. There must be no requests.

        Returns when all servers have the weights, and at the latest after twice the first server's time; late servers
        join when they are ready. Raises `ValueError` when all servers refuse the weights, and `WrongWeights` when the
        servers that took the weights have different logprobs from `probe`.
        """
        self._live.change(weights, probe)
        for task in self._joining:
            task.cancel()
        for server in self.servers:
            server.state, server.weights_verified = ServerState.JOINING, False
        started_s = monotonic()
        joining = await self._first_serving([self._start_joining(server, judge=True) for server in self.servers])
        if joining:
            await asyncio.wait(joining, timeout=monotonic() - started_s)

    async def _first_serving(self, joining: Sequence[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Wait until a server serves, and return the other servers' tasks. Raises `ValueError` or `WrongWeights` if all
        fail."""
        waiting = set(joining)
        while not self.serving:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not waiting and not self.serving:
                raise _reason(joining)
        return waiting

    async def close(self) -> None:
        """Close the connections."""
        for task in self._joining:
            task.cancel()
        if self._http is not None:
            await self._http.close()

    async def ask(self, body: Mapping[str, Any], session: str | None, tokens: Tokens) -> None:
        """Collect a completion request's answer in `tokens`, from the start at every try.

        Raises `ValueError` for a request that is refused, `RequestFailed`, and `EngineDead` when no server answers the
        simplest request either.
        """

        async def ask_one(server: Server) -> None:
            try:
                tokens.begin(server.url)
                if server.in_flight == 1:  # the server may have been restarted while idle
                    server.weights_verified = False
                await self._live.verify(self._session(), server)
                async for event in server.stream(self._session(), body):
                    server.heard()
                    part = server.read(event, len(tokens.ids))
                    self._live.check_name(part.weights)
                    tokens.add(part)
                if tokens.reason is None:
                    raise TransientError("the answer ended without a finish_reason")
            except TransientError:
                server.weights_verified = False
                raise

        await self.send(ask_one, session)

    def choose(self, session: str | None, failed: Server | None) -> Server:
        """This session's server, otherwise the least loaded server; if possible, not `failed`."""
        allowed = self.serving or list(self.servers)
        allowed = [server for server in allowed if server is not failed] or allowed
        chosen = self._sessions.get(session)
        if chosen is None or chosen not in allowed:
            chosen = min(allowed, key=attrgetter("in_flight"))
        self._sessions.set(session, chosen)
        return chosen

    def eject(self, server: Server, error: TransientError) -> bool:
        """Send no requests to a failed server until it works again. Returns whether there is another server."""
        others = any(other is not server for other in self.serving)
        if others and server.serving:  # the last server stays: its requests have nowhere else to go
            log.warning("%s gets no requests until it works again: %s", server.url, error)
            server.state = ServerState.EJECTED
            self._start_joining(server)
        return others

    async def give_up(self, server: Server, failures: int, error: TransientError) -> NoReturn:
        """Raise `RequestFailed` if a server still answers the simplest request, and `EngineDead` otherwise."""
        last = error
        for other in self.serving:
            try:
                await other.probe(self._session())
            except TransientError as probe_error:
                last = probe_error
            else:
                raise RequestFailed(f"{server.url} failed {failures} times; last error: {error}") from error
        urls = ", ".join(server.url for server in self.servers)
        raise EngineDead(f"{urls}: {error}; the simplest request failed too: {last}") from error

    def _start_joining(self, server: Server, *, judge: bool = False) -> asyncio.Task[None]:
        """Start a task that joins a server. With `judge`, it raises `WrongWeights`, and another task keeps trying."""
        task = asyncio.create_task(self._join(server, judge=judge))
        self._joining[task] = server

        def joined(task: asyncio.Task[None]) -> None:
            del self._joining[task]
            error = None if task.cancelled() else task.exception()
            if isinstance(error, WrongWeights):
                self._start_joining(server)
            elif error is not None:
                log.error("%s cannot be used: %s", server.url, error)

        task.add_done_callback(joined)
        return task

    async def _join(self, server: Server, *, judge: bool) -> None:
        """Try until the server serves. Raises `ValueError` if the server is unfit for training and, with `judge`,
        `WrongWeights`."""
        failures = 0
        while True:
            try:
                await self._meet(server)
            except TransientError as error:
                if isinstance(error, WrongWeights):
                    server.accuse(error)
                    if judge:
                        raise
                failures += 1
                log.log(logging.INFO if failures == 1 else logging.DEBUG, "waiting for %s: %s", server.url, error)
                await asyncio.sleep(growing_pause_s(self.policy, failures, error.retry_after_s, random.random()))
            else:
                log.info("%s serves", server.url)
                server.accused = False
                return

    async def _meet(self, server: Server) -> None:
        """Run all checks on a server, then let it serve. Raises `TransientError` or `ValueError`."""
        http = self._session()
        await server.describe(http, self._wanted_model, pushes=self._pushes)
        if self._pushes and self._live.pushed is None:  # a worker that died in a swap may have left it paused
            await self._routes.resume(http, server.url)
        server.checked = False
        await self._live.verify(self._session(), server)
        await server.probe(http)
        server.priorities = await server.accepts_priorities(http)
        async with self._comparing:  # of two servers that join concurrently, only one may count as the first
            other = None if self._live.pushed is not None else next(iter(self.serving), None)
            if other is not None and not await server.has_weights_of(http, other):
                raise TransientError(f"its answers differ from the answers of {other.url}: it serves other weights")
            server.state = ServerState.SERVING

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise EngineDead("the engine was not started")
        return self._http


def _reason(joining: "Sequence[asyncio.Task[None]]") -> BaseException:
    """The reason why no server serves: wrong weights if there are any, otherwise the first error."""
    errors = [error for task in joining if not task.cancelled() and (error := task.exception())]
    wrong = [error for error in errors if isinstance(error, WrongWeights)]
    return next(iter(wrong + errors), EngineDead("the engine is closed"))
