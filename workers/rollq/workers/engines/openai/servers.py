"""Several servers of one model: who gets a request, who is out, and how it comes back.

Invariant: a server gets requests only after it has answered the simplest one right since it failed the last, and only
while its answers are those of the others, so that one which was started again with old weights stays out. The last one
is never out: its failures are for the caller to judge.

Where weights are pushed, a server is in only with the weights that are wanted, and is asked for their name before the
first request after a failure or a time without any: it may have been started again.
"""

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp
import numpy as np

from rollq.buffer.errors import WeightsError
from rollq.buffer.rollouts import Float32Array
from rollq.workers.engines.limits import token_limit
from rollq.workers.engines.openai import weight_routes
from rollq.workers.engines.openai.completions_api import (
    NO_LIMIT_TOKENS,
    PROBE,
    Tokens,
    check_probe,
    choose_model,
    fingerprint_body,
    read_completion,
    read_fingerprint,
    request_body,
)
from rollq.workers.engines.openai.weight_routes import Weights
from rollq.workers.engines.protocol import EngineDead, WeightsVersion
from rollq.workers.http.client import TransientError, exchange, open_session, stream
from rollq.workers.http.retries import RetryPolicy, backoff_s

log = logging.getLogger(__name__)

NO_VERSION = WeightsVersion(0, 0, "")
SAME_NATS = 0.05
"""Logprobs of the same weights differ by less, on different machines and kernels."""
SESSIONS = 10_000
"""Conversations whose server is remembered."""


class RequestFailed(RuntimeError):
    """The servers answer others, but not this request, however often."""


@dataclass(slots=True, eq=False)
class Server:
    """One server: its name for the model, whether it takes priorities, how many requests are under way, and whether it
    gets any. `sure` while nothing can have changed the weights that were pushed into it."""

    url: str
    model: str = ""
    context_tokens: int = NO_LIMIT_TOKENS
    priorities: bool = False
    asked: int = 0
    out: bool = True
    sure: bool = False
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


class Servers:
    """Requests to whichever server has the least to do."""

    def __init__(self, urls: Sequence[str], model: str | None, policy: RetryPolicy, *, pushes: bool) -> None:
        """`pushes`: weights are loaded into the servers, by `serve`."""
        self._pushes = pushes
        self._weights: Weights | None = None
        self._servers = [Server(url.rstrip("/")) for url in urls]
        self._wanted_model = model
        self._policy = policy
        self._sessions: OrderedDict[str, Server] = OrderedDict()
        self._joining: dict[asyncio.Task[None], Server] = {}
        self._one_at_a_time = asyncio.Lock()
        self._http: aiohttp.ClientSession | None = None

    @property
    def context_tokens(self) -> int:
        """The smallest context of all that were met."""
        return min(server.context_tokens for server in self._servers)

    async def start(self, timeout_s: float, key: str | None) -> None:
        """Wait until the first server is in; the others join when they are ready. Raises `ValueError` when none can
        serve training."""
        self._http = open_session(timeout_s, key)
        await self._first_in([self._start_joining(server) for server in self._servers])

    async def check(self, weights: Weights) -> None:
        """Raise `WeightsError` unless a server can read `weights`."""
        refusals = []
        for server in self._servers:
            if not server.out:
                try:
                    return await weight_routes.check(self._session(), server.url, weights)
                except (TransientError, ValueError) as error:
                    refusals.append(f"{server.url}: {error}")
        raise WeightsError(
            f"no server can load weights {str(weights.folder)!r}: {'; '.join(refusals)}. They must be in a folder that "
            f"every server sees under the same path; {weight_routes.NEEDED}"
        )

    async def serve(self, weights: Weights) -> None:
        """Load `weights` into all servers, while there are no requests. Returns when the first server has them, and the
        others too or had as much time again; those join when they do.

        Raises `ValueError` when none will ever take them.
        """
        self._weights = weights
        for task in self._joining:
            task.cancel()
        for server in self._servers:
            server.out, server.sure = True, False
        started_s = monotonic()
        joining = await self._first_in([self._start_joining(server) for server in self._servers])
        if joining:
            await asyncio.wait(joining, timeout=monotonic() - started_s)

    async def _first_in(self, joining: Sequence[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Wait until a server is in; the tasks of those that are not yet. Raises `ValueError` when all are refused."""
        waiting = set(joining)
        while all(server.out for server in self._servers):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not waiting and all(server.out for server in self._servers):
                for task in joining:
                    if not task.cancelled():
                        task.result()  # raises why
                raise EngineDead("the engine is closed")
        return waiting

    async def close(self) -> None:
        """Let go of the servers."""
        for task in self._joining:
            task.cancel()
        if self._http is not None:
            await self._http.close()

    async def ask(self, body: Mapping[str, Any], session: str | None, into: Tokens) -> None:
        """Have a request for a completion answered `into` what is there of it, from the start at every try: as often as
        the policy says, elsewhere if there is another server.

        Raises `ValueError` for what is always refused, `RequestFailed`, and `EngineDead` when no server answers the
        simplest request either.
        """
        failures, failed = 0, None
        while True:
            server = self._choose(session, failed)
            server.sure = server.sure and server.asked > 0
            server.asked += 1
            try:
                into.begin(server.url)
                await self._make_sure(server)
                async for event in stream(self._session(), f"{server.url}/completions", _named(server, body)):
                    into.add(event)
                if into.reason is None:
                    raise TransientError("the answer ended without a finish_reason")
                return
            except TransientError as error:
                failures, failed, server.sure = failures + 1, server, False
                pause_s = backoff_s(self._policy, failures, error.retry_after_s, random.random())
                if pause_s is None:
                    await self._blame(error)
                    raise RequestFailed(f"{server.url} failed {failures} times, last with {error}") from error
                elsewhere = self._put_out(server, error)
                log.debug("try %d at %s failed: %s", failures, server.url, error)
            finally:
                server.asked -= 1
            if not elsewhere:
                await asyncio.sleep(pause_s)

    def _choose(self, session: str | None, failed: Server | None) -> Server:
        """The server of this conversation, else that with the least to do; another than that which failed, if any."""
        allowed = [server for server in self._servers if not server.out] or self._servers
        allowed = [server for server in allowed if server is not failed] or allowed
        chosen = self._sessions.get(session) if session is not None else None
        if chosen not in allowed or chosen is None:
            chosen = min(allowed, key=lambda server: server.asked)
        if session is not None:
            self._sessions[session] = chosen
            self._sessions.move_to_end(session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    def _put_out(self, server: Server, error: TransientError) -> bool:
        """Give a server that failed nothing more until it has shown that it works; whether there is another."""
        others = any(not other.out for other in self._servers if other is not server)
        if others and not server.out:
            log.warning("%s is out until it works again: %s", server.url, error)
            server.out = True
            self._start_joining(server)
        return others

    def _start_joining(self, server: Server) -> asyncio.Task[None]:
        task = asyncio.create_task(self._join(server))
        self._joining[task] = server
        task.add_done_callback(self._joined)
        return task

    def _joined(self, task: asyncio.Task[None]) -> None:
        server = self._joining.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s stays out: %s", server.url, error)

    async def _join(self, server: Server) -> None:
        """Try until the server works. Raises `ValueError` when it is not one for training."""
        failures = 0
        while True:
            try:
                await self._meet(server)
            except TransientError as error:
                failures += 1
                log.log(logging.INFO if failures == 1 else logging.DEBUG, "waiting for %s: %s", server.url, error)
                endless = RetryPolicy(failures, self._policy.first_s, self._policy.longest_s)
                await asyncio.sleep(backoff_s(endless, failures, error.retry_after_s, random.random()) or 0)
            else:
                log.info("%s serves", server.url)
                return

    async def _meet(self, server: Server) -> None:
        listed = await exchange(self._session(), "GET", f"{server.url}/models", None)
        server.model, server.context_tokens = choose_model(listed, self._wanted_model)
        if self._pushes and self._weights is None:
            await weight_routes.resume(self._session(), server.url)
        await self._make_sure(server)
        check_probe(read_completion(await self._probe(server), NO_VERSION))
        server.priorities = await self._takes_priorities(server)
        async with self._one_at_a_time:
            other = next((other for other in self._servers if not other.out), None)
            named = self._weights is not None  # and it has them
            if other is not None and not named and not await self._same(server, other):
                raise TransientError(f"its answers are not those of {other.url}: it serves other weights")
            server.out = False

    async def _same(self, server: Server, other: Server) -> bool:
        mine, theirs = await self._fingerprint(server), await self._fingerprint(other)
        return mine.shape == theirs.shape and bool((np.abs(mine - theirs) < SAME_NATS).all())

    async def _fingerprint(self, server: Server) -> Float32Array:
        return read_fingerprint(await self._complete(server, fingerprint_body()))

    async def _make_sure(self, server: Server) -> None:
        """Where weights are pushed, see that the server has them. Those that ask meanwhile wait."""
        async with server.loading:
            if self._weights is not None and not server.sure:
                await weight_routes.load(self._session(), server.url, self._weights)
                server.sure = True

    async def _probe(self, server: Server) -> Any:
        tokens = token_limit(PROBE, server.context_tokens)
        return await self._complete(server, request_body(PROBE, tokens, NO_VERSION))

    async def _takes_priorities(self, server: Server) -> bool:
        """Some servers refuse them when they do not schedule by them."""
        body = {**request_body(PROBE, 1, NO_VERSION), "model": server.model, "priority": 1}
        try:
            await exchange(self._session(), "POST", f"{server.url}/completions", body)
        except ValueError:
            return False
        return True

    async def _blame(self, error: TransientError) -> None:
        """Raise `EngineDead` unless a server that gets requests answers the simplest one."""
        last = error
        for server in [server for server in self._servers if not server.out]:
            try:
                await self._probe(server)
            except TransientError as also:
                last = also
            else:
                return
        urls = ", ".join(server.url for server in self._servers)
        raise EngineDead(f"{urls}: {error}; the simplest request failed too: {last}") from error

    async def _complete(self, server: Server, body: Mapping[str, Any]) -> Any:
        return await exchange(self._session(), "POST", f"{server.url}/completions", _named(server, body))

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise EngineDead("the engine was not started")
        return self._http


def _named(server: Server, body: Mapping[str, Any]) -> dict[str, Any]:
    """The request, with what this server calls the model, and without what it refuses."""
    named = {**body, "model": server.model}
    if not server.priorities:
        del named["priority"]
    return named
