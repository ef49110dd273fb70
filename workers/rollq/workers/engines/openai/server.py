"""One server of a model with OpenAI's completions API: its state, and the exchanges with it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp
import numpy as np

from rollq.buffer.rollouts import Float32Array
from rollq.workers.engines.limits import token_limit
from rollq.workers.engines.openai import weight_routes
from rollq.workers.engines.openai.completions_api import (
    NO_LIMIT_TOKENS,
    PROBE,
    check_probe,
    fingerprint_body,
    read_completion,
    read_fingerprint,
    request_body,
)
from rollq.workers.engines.openai.weight_routes import Weights
from rollq.workers.engines.protocol import WeightsVersion
from rollq.workers.http.client import exchange, stream
from rollq.workers.http.server_pool import PooledServer

NO_VERSION = WeightsVersion(0, 0, "")
SAME_NATS = 0.05
"""Logprobs of equal weights differ by less than this, across machines and kernels."""


class ServerState(StrEnum):
    """Whether a server gets requests.

    state     gets requests            leaves it when
    joining   no                       it has passed all checks -> serving
    serving   yes                      a request failed and another server is there -> ejected;
                                       new weights are loaded -> joining
    ejected   only if no server        it has passed all checks -> serving;
              is serving               new weights are loaded -> joining
    """

    JOINING = "joining"
    SERVING = "serving"
    EJECTED = "ejected"


@dataclass(slots=True, eq=False)
class Server(PooledServer):
    """One server. `model` is its name for the model; `priorities`: it accepts the parameter `priority`.

    `weights_verified` while nothing can have changed the weights that were pushed into it.
    """

    model: str = ""
    context_tokens: int = NO_LIMIT_TOKENS
    priorities: bool = False
    state: ServerState = ServerState.JOINING
    weights_verified: bool = False
    _verifying: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def serving(self) -> bool:
        """Whether the server gets requests."""
        return self.state is ServerState.SERVING

    def stream(self, http: aiohttp.ClientSession, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The events of a streamed completion."""
        return stream(http, f"{self.url}/completions", self._named(body))

    async def complete(self, http: aiohttp.ClientSession, body: Mapping[str, Any]) -> Any:
        """The answer to a request for a completion."""
        return await exchange(http, "POST", f"{self.url}/completions", self._named(body))

    async def probe(self, http: aiohttp.ClientSession) -> None:
        """Send the simplest request. Raises `ValueError` if its answer has not what training needs."""
        tokens = token_limit(PROBE, self.context_tokens)
        answer = await self.complete(http, request_body(PROBE, tokens, NO_VERSION))
        check_probe(read_completion(answer, NO_VERSION))

    async def fingerprint(self, http: aiohttp.ClientSession) -> Float32Array:
        """Logprobs that identify the weights; see `read_fingerprint`."""
        return read_fingerprint(await self.complete(http, fingerprint_body()))

    async def has_weights_of(self, http: aiohttp.ClientSession, other: "Server") -> bool:
        """Whether both servers have the same weights, judged by their logprobs."""
        mine, theirs = await self.fingerprint(http), await other.fingerprint(http)
        return mine.shape == theirs.shape and bool((np.abs(mine - theirs) < SAME_NATS).all())

    async def accepts_priorities(self, http: aiohttp.ClientSession) -> bool:
        """Whether the server accepts priorities; some refuse them unless they schedule by them."""
        body = {**request_body(PROBE, 1, NO_VERSION), "model": self.model, "priority": 1}
        try:
            await exchange(http, "POST", f"{self.url}/completions", body)
        except ValueError:
            return False
        return True

    async def verify_weights(self, http: aiohttp.ClientSession, weights: Weights | None) -> None:
        """See that the server has the weights that are pushed, if any. Concurrent callers wait for one check."""
        async with self._verifying:
            if weights is not None and not self.weights_verified:
                await weight_routes.load(http, self.url, weights)
                self.weights_verified = True

    def _named(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The request with this server's name for the model, and without a priority if it refuses those."""
        named = {**body, "model": self.model}
        if not self.priorities:
            del named["priority"]
        return named
