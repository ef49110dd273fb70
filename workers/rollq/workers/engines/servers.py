"""Several servers of one model: who gets a request, who is out, and how it comes back.

Invariant: a server gets requests only after it has answered the simplest one right since it failed the last, and only
while its answers are those of the others, so that one which was started again with old weights stays out. The last one
is never out: its failures are for the caller to judge.
"""

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from rollq.buffer.schema import Float32Array
from rollq.workers.engine import EngineDead, WeightsVersion
from rollq.workers.engines.completions_api import (
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
from rollq.workers.engines.limits import token_limit
from rollq.workers.http import TryAgain, exchange, open_session, stream
from rollq.workers.retries import RetryPolicy, backoff_s

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
    gets any."""

    url: str
    model: str = ""
    context_tokens: int = NO_LIMIT_TOKENS
    priorities: bool = False
    asked: int = 0
    out: bool = True


class Servers:
    """Requests to whichever server has the least to do."""

    def __init__(self, urls: Sequence[str], model: str | None, policy: RetryPolicy) -> None:
        self._servers = [Server(url.rstrip("/")) for url in urls]
        self._wanted_model = model
        self._policy = policy
        self._sessions: OrderedDict[str, Server] = OrderedDict()
        self._joining: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()
        self._http: aiohttp.ClientSession | None = None

    @property
    def context_tokens(self) -> int:
        """The smallest context of those that are in."""
        return min(server.context_tokens for server in self._servers if not server.out)

    async def start(self, timeout_s: float, key: str | None) -> None:
        """Wait until the first server is in; the others join when they are ready. Raises `ValueError` when none can
        serve training."""
        self._http = open_session(timeout_s, key)
        joining = [self._start_joining(server) for server in self._servers]
        while all(server.out for server in self._servers):
            done, waiting = await asyncio.wait(joining, return_when=asyncio.FIRST_COMPLETED)
            if not waiting and all(server.out for server in self._servers):
                await asyncio.gather(*done)  # raises why
            joining = list(waiting)

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
            server.asked += 1
            try:
                into.begin(server.url)
                async for event in stream(self._session(), f"{server.url}/completions", _named(server, body)):
                    into.add(event)
                if into.reason is None:
                    raise TryAgain("the answer ended without a finish_reason")
                return
            except TryAgain as error:
                failures, failed = failures + 1, server
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

    def _put_out(self, server: Server, error: TryAgain) -> bool:
        """Give a server that failed nothing more until it has shown that it works; whether there is another."""
        others = any(not other.out for other in self._servers if other is not server)
        if others and not server.out:
            log.warning("%s is out until it works again: %s", server.url, error)
            server.out = True
            self._start_joining(server)
        return others

    def _start_joining(self, server: Server) -> asyncio.Task[None]:
        task = asyncio.create_task(self._join(server))
        self._joining.add(task)
        task.add_done_callback(self._joined)
        return task

    def _joined(self, task: asyncio.Task[None]) -> None:
        self._joining.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a server stays out: %s", error)

    async def _join(self, server: Server) -> None:
        """Try until the server works. Raises `ValueError` when it is not one for training."""
        failures = 0
        while True:
            try:
                await self._meet(server)
            except TryAgain as error:
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
        check_probe(read_completion(await self._probe(server), NO_VERSION))
        server.priorities = await self._takes_priorities(server)
        async with self._one_at_a_time:
            other = next((other for other in self._servers if not other.out), None)
            if other is not None and not await self._same(server, other):
                raise TryAgain(f"its answers are not those of {other.url}: it serves other weights")
            server.out = False

    async def _same(self, server: Server, other: Server) -> bool:
        mine, theirs = await self._fingerprint(server), await self._fingerprint(other)
        return mine.shape == theirs.shape and bool((np.abs(mine - theirs) < SAME_NATS).all())

    async def _fingerprint(self, server: Server) -> Float32Array:
        return read_fingerprint(await self._complete(server, fingerprint_body()))

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

    async def _blame(self, error: TryAgain) -> None:
        """Raise `EngineDead` unless a server answers the simplest request."""
        last = error
        for server in sorted(self._servers, key=lambda server: server.out):
            try:
                await self._probe(server)
            except TryAgain as also:
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
