"""One server: its state, and the exchanges with it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp
import numpy as np
import orjson

from rollq.buffer.values.rollouts import Float32Array, Int32Array
from rollq.workers.engines.limits import token_limit
from rollq.workers.engines.openai.dialect import NO_LIMIT_TOKENS, PROBE_IDS, Dialect
from rollq.workers.engines.openai.tokens import Part
from rollq.workers.engines.protocol import SEQUENCES, Request, Sampling
from rollq.workers.engines.weights_check import WeightsCheck
from rollq.workers.http.client import TransientError, exchange, refusal, stream
from rollq.workers.http.server_pool import PooledServer

log = logging.getLogger(__name__)

SAME_NATS = 0.05
"""Equal weights' logprobs differ by less than this, across machines and kernels."""
ASSUMED_DTYPE = "bfloat16"
"""Assumed for a server that does not report its dtype."""


class WrongWeights(TransientError):
    """A server's logprobs differ from the expected ones."""


class ServerState(StrEnum):
    """Whether a server gets requests.

    state     gets requests            leaves it when
    joining   no                       it has passed all checks -> serving
    serving   yes                      a request failed and another server serves -> ejected;
                                       new weights are loaded -> joining
    ejected   only if no server        it has passed all checks -> serving;
              is serving               new weights are loaded -> joining
    """

    JOINING = "joining"
    SERVING = "serving"
    EJECTED = "ejected"


@dataclass(slots=True, eq=False)
class Server(PooledServer):
    """One server. `model` is its name for the model. `priorities` is true if it accepts the parameter `priority`.
    `weights_verified` is true if it has been verified to hold the pushed weights, and nothing can have changed them
    since. `checked` is true if its logprobs agree with the live weights', or cannot be compared. `check` is the
    comparison's result, if any. `accused` is true once wrong logprobs have been logged.
    """

    dialect: Dialect = field(kw_only=True)
    model: str = ""
    context_tokens: int = NO_LIMIT_TOKENS
    priorities: bool = False
    state: ServerState = ServerState.JOINING
    weights_verified: bool = False
    checked: bool = False
    check: WeightsCheck | None = None
    dtype: str = ASSUMED_DTYPE
    max_sequences: int = SEQUENCES
    accused: bool = False
    verifying: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def serving(self) -> bool:
        """Whether the server gets requests."""
        return self.state is ServerState.SERVING

    async def stream(self, http: aiohttp.ClientSession, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """Yield the events of a streamed completion. Raises the exceptions of `exchange`."""
        async for event in stream(http, self._address, self._named(body)):
            if (status := self.dialect.api.status_of(event)) is not None:
                raise refusal(self._address, status, orjson.dumps(event))
            yield event

    def read(self, event: Any, have: int) -> Part:
        """The new tokens in an event after `have` tokens. Raises `ValueError` if the event lacks token ids or
        logprobs."""
        try:
            return self.dialect.api.read_part(event, have)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"the answer of {self.url} lacks token ids, logprobs or a finish_reason ({type(error).__name__}: "
                f"{error}): {self.dialect.api.NEEDED}; it said {event!r:.200}"
            ) from error

    async def complete(self, http: aiohttp.ClientSession, body: Mapping[str, Any]) -> Any:
        """The answer to a request for a completion."""
        return await exchange(http, "POST", self._address, self._named(body))

    async def describe(self, http: aiohttp.ClientSession, model: str | None, *, pushes: bool) -> None:
        """Ask for the model, its context and its dtype. Raises `TransientError` or `ValueError`."""
        description = await self.dialect.describe(http, self.url, model, pushes=pushes)
        self.model, self.context_tokens = description.model, description.context_tokens
        self.dtype = description.dtype or ASSUMED_DTYPE
        self.max_sequences = description.max_sequences or SEQUENCES

    async def probe(self, http: aiohttp.ClientSession) -> None:
        """Send the simplest request. Raises `ValueError` if its answer lacks values that training needs."""
        api = self.dialect.api
        tokens = token_limit(Request(PROBE_IDS, Sampling(max_tokens=8)), self.context_tokens)
        api.check_probe(await self.complete(http, api.probe_body(tokens)))

    async def fingerprint(self, http: aiohttp.ClientSession) -> Float32Array:
        """Logprobs that identify the weights; see `read_fingerprint`."""
        api = self.dialect.api
        return api.read_fingerprint(await self.complete(http, api.fingerprint_body()))

    async def has_weights_of(self, http: aiohttp.ClientSession, other: "Server") -> bool:
        """Compare both servers' logprobs, and return whether the weights are the same."""
        own, theirs = await self.fingerprint(http), await other.fingerprint(http)
        return own.shape == theirs.shape and bool((np.abs(own - theirs) < SAME_NATS).all())

    async def accepts_priorities(self, http: aiohttp.ClientSession) -> bool:
        """Whether the server accepts priorities. Some servers refuse priorities unless they schedule by them."""
        self.priorities = True
        try:
            await self.complete(http, {**self.dialect.api.probe_body(1), "priority": 1})
        except ValueError:
            return False
        return True

    def accuse(self, error: WrongWeights) -> None:
        """Log once that the server gets no requests because its weights are wrong."""
        if not self.accused:
            log.error("%s gets no requests: %s", self.url, error)
        self.accused = True

    async def score(self, http: aiohttp.ClientSession, prompt: Int32Array) -> Float32Array:
        """The logprobs of a prompt's tokens; see `read_scores`. Raises `TransientError`, and `ValueError` if the answer
        has no logprobs."""
        api = self.dialect.api
        return api.read_scores(await self.complete(http, api.score_body(prompt)), prompt)

    @property
    def _address(self) -> str:
        return self.dialect.api.url_of(self.url)

    def _named(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The request with this server's name for the model, and without a priority if the server refuses
        priorities."""
        named = {**body, "model": self.model} if self.model else dict(body)
        if not self.priorities:
            del named["priority"]
        return named
