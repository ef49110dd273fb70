"""An engine behind HTTP: a server with OpenAI's completions API that returns token ids, such as vLLM's.

Token ids go in as the prompt; `token_ids` and `logprobs` come out (vLLM's `return_token_ids`). Invariant: all tokens of
a request carry the version that served when the request began. The engine loads no weights: `swap` notes the version
when the server follows the trainer by itself, and otherwise accepts only version 0, which the server was started with.

A request that fails for a reason of the server's is tried again with growing pauses. When its tries are spent, the
server is asked the simplest thing: if that works, the request fails alone; if not, the engine is dead. Requests are not
streamed, so a swap that aborts gets no partial tokens of them, and priorities are not sent.
"""

import asyncio
import logging
import os
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from pydantic import Field

from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.schema import FinishReason
from rollq.buffer.settings import Settings
from rollq.workers.engine import Completion, EngineDead, Request, SwapMode, WeightsVersion
from rollq.workers.engines.completions_api import (
    NO_LIMIT_TOKENS,
    PROBE,
    check_probe,
    choose_model,
    read_completion,
    request_body,
)
from rollq.workers.engines.limits import token_limit
from rollq.workers.http import TryAgain, exchange, open_session
from rollq.workers.retries import RetryPolicy, backoff_s

log = logging.getLogger(__name__)

API_KEY = "ROLLQ_ENGINE_API_KEY"
"""Environment variable with the server's key, if it wants one."""


class OpenAISettings(Settings):
    """Where the server is, and how long it is believed in."""

    url: str = Field(pattern=r"^https?://\S+$", description="base of the API, such as http://127.0.0.1:8000/v1")
    served_model: str | None = Field(default=None, description="name at the server; default: the only one it serves")
    server_follows: bool = Field(default=False, description="the server loads each published version by itself")
    request_timeout_s: float = Field(default=600, gt=0, description="longest wait for one answer")
    start_timeout_s: float = Field(default=600, gt=0, description="longest wait for a server that still starts")
    retries: int = Field(default=8, ge=0, description="tries of a request after its first")
    retry_first_s: float = Field(default=0.5, gt=0, description="pause before the second try; it doubles")
    retry_longest_s: float = Field(default=30, gt=0, description="longest such pause, unless the server asks for more")


class RequestFailed(RuntimeError):
    """The server answers others, but not this request, however often."""


@dataclass(slots=True, eq=False)
class _Call:
    """A request, and the task that asks the server; `begun` when it no longer waits for a swap or a sleep to end."""

    request: Request
    begun: bool = False
    asking: asyncio.Future[Completion] = field(init=False)


class OpenAIEngine:
    """`Engine` over HTTP."""

    def __init__(self, settings: OpenAISettings) -> None:
        self.version = WeightsVersion(0, 0, "")
        self._settings = settings
        self._url = settings.url.rstrip("/")
        self._policy = RetryPolicy(settings.retries, settings.retry_first_s, settings.retry_longest_s)
        self._model = settings.served_model or ""
        self._context_tokens = NO_LIMIT_TOKENS
        self._session: aiohttp.ClientSession | None = None
        self._calls: set[_Call] = set()
        self._open = asyncio.Event()
        self._asleep = False
        self._swap_lock = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Wait for the server, choose its model, and see that it returns what training needs.

        Raises `ConfigError` when it does not, `EngineDead` when it does not answer in time.
        """
        self._session = open_session(self._settings.request_timeout_s, os.environ.get(API_KEY))
        try:
            await self._meet_server()
        except BaseException:
            await self.close()
            raise
        self._open.set()

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`. Raises `ValueError` with the server's words for a request that it refuses (4xx),
        `RequestFailed` for one that it cannot answer while it answers others."""
        tokens = token_limit(request, self._context_tokens)
        call = _Call(request)
        call.asking = asyncio.ensure_future(self._serve(call, tokens))
        self._calls.add(call)
        try:
            await asyncio.wait([call.asking])
        finally:
            call.asking.cancel()
            self._calls.discard(call)
        if call.asking.cancelled():
            self._check_alive()
            return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), FinishReason.ABORT)
        return call.asking.result()

    async def _serve(self, call: _Call, tokens: int) -> Completion:
        await self._open.wait()
        self._check_alive()
        call.begun, version = True, self.version
        return read_completion(await self._ask(request_body(call.request, tokens, self._model, version)), version)

    async def swap(self, weights: Path, version: WeightsVersion, mode: SwapMode) -> float:
        """Note that the server serves `version` from now on; `weights` are not sent to it."""
        async with self._swap_lock:
            self._check_alive()
            if version.version and not self._settings.server_follows:
                raise WeightsError(
                    f"the server {self._url} was not given the weights of version {version.version}: this engine loads "
                    "none. If something else loads every version into it before the trainer publishes it, set "
                    "server_follows = true in [worker.options]; else use an engine that loads weights"
                )
            if mode is SwapMode.ABORT:
                await self.abort([call.request for call in self._calls if call.begun and not call.request.must_finish])
            await self._drain(mode)
            self.version = version
            return 0.0

    async def abort(self, requests: Collection[Request]) -> None:
        """End requests with no tokens: those under way at the server are lost; see `Engine.abort`."""
        wanted = set(requests)
        for call in self._calls:
            if call.request in wanted:
                call.asking.cancel()

    async def sleep(self) -> None:
        """Send no requests; the server keeps its memory."""
        self._check_alive()
        self._asleep = True
        self._open.clear()
        await self.abort([call.request for call in self._calls if call.begun])

    async def wake(self) -> None:
        """Send requests again."""
        self._asleep = False
        self._open.set()

    async def close(self) -> None:
        """Let go of the server; running requests end with `EngineDead`."""
        self._closed = True
        self._open.set()
        for call in self._calls:
            call.asking.cancel()
        if self._session is not None:
            await self._session.close()

    async def _drain(self, mode: SwapMode) -> None:
        """Let the requests under way that a swap waits for end, while new ones wait."""
        begun = [call for call in self._calls if call.begun]
        holding = [call.asking for call in begun if mode is SwapMode.WAIT or call.request.must_finish]
        if not holding:
            return
        self._open.clear()
        try:
            await asyncio.wait(holding)
        finally:
            if not self._asleep:
                self._open.set()
        self._check_alive()

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDead("the engine is closed")

    # the server

    async def _meet_server(self) -> None:
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                listed = await self._persist("GET", "/models")
                self._model, self._context_tokens = choose_model(listed, self._settings.served_model)
                probed = await self._persist("POST", "/completions", self._probe())
                check_probe(read_completion(probed, self.version))
        except TimeoutError:
            raise EngineDead(
                f"{self._url} was not ready within start_timeout_s = {self._settings.start_timeout_s:g} s"
            ) from None
        except ValueError as error:
            raise ConfigError(f"engine 'openai': {error}") from error

    def _probe(self) -> dict[str, Any]:
        return request_body(PROBE, token_limit(PROBE, self._context_tokens), self._model, self.version)

    async def _persist(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Try until cancelled."""
        failures = 0
        while True:
            try:
                return await self._try(method, path, body)
            except TryAgain as error:
                failures += 1
                log.log(logging.INFO if failures == 1 else logging.DEBUG, "waiting for %s: %s", self._url, error)
                endless = RetryPolicy(failures, self._policy.first_s, self._policy.longest_s)
                await asyncio.sleep(backoff_s(endless, failures, error.retry_after_s, random.random()) or 0)

    async def _ask(self, body: Mapping[str, Any]) -> Any:
        """The server's answer to one request for a completion, tried as often as the policy says."""
        failures = 0
        while True:
            try:
                return await self._try("POST", "/completions", body)
            except TryAgain as error:
                failures += 1
                pause_s = backoff_s(self._policy, failures, error.retry_after_s, random.random())
                if pause_s is None:
                    await self._blame(error)
                    raise RequestFailed(f"{self._url} failed {failures} times, last with {error}") from error
                log.debug("try %d at %s failed, the next one in %.1f s: %s", failures, self._url, pause_s, error)
            await asyncio.sleep(pause_s)

    async def _blame(self, error: TryAgain) -> None:
        """Raise `EngineDead` unless the server answers the simplest request."""
        try:
            await self._try("POST", "/completions", self._probe())
        except TryAgain as also:
            raise EngineDead(f"{self._url}: {error}; the simplest request failed too: {also}") from error

    async def _try(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """One exchange. Raises `TryAgain`, or `ValueError` for what the server will always refuse."""
        if self._session is None:
            raise EngineDead("the engine was not started")
        return await exchange(self._session, method, self._url + path, body)
