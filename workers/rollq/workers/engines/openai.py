"""An engine behind HTTP: servers with OpenAI's completions API that return token ids, such as vLLM's.

Token ids go in as the prompt; `token_ids` and `logprobs` come out (vLLM's `return_token_ids`). Invariant: all tokens of
a request carry the version that served when the request began. The engine loads no weights: `swap` notes the version
when the server follows the trainer by itself, and otherwise accepts only version 0, which the server was started with.

A request that fails for a reason of the server's is tried again, at another one or with growing pauses. When its tries
are spent, the servers are asked the simplest thing: if one answers, the request fails alone; if not, the engine is
dead.
"""

import asyncio
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.schema import FinishReason
from rollq.buffer.settings import Settings
from rollq.workers.engine import Completion, EngineDead, Request, SwapMode, WeightsVersion
from rollq.workers.engines.completions_api import Tokens, request_body
from rollq.workers.engines.limits import token_limit
from rollq.workers.engines.servers import Servers
from rollq.workers.retries import RetryPolicy

log = logging.getLogger(__name__)

API_KEY = "ROLLQ_ENGINE_API_KEY"
"""Environment variable with the server's key, if it wants one."""


class OpenAISettings(Settings):
    """Where the servers are, and how long they are believed in."""

    urls: tuple[Annotated[str, Field(pattern=r"^https?://\S+$")], ...] = Field(
        min_length=1, description="base of the API of each server, such as http://127.0.0.1:8000/v1"
    )
    served_model: str | None = Field(default=None, description="name at the server; default: the only one it serves")
    server_follows: bool = Field(default=False, description="the server loads each published version by itself")
    request_timeout_s: float = Field(default=600, gt=0, description="longest wait for one answer")
    start_timeout_s: float = Field(default=600, gt=0, description="longest wait for a server that still starts")
    retries: int = Field(default=8, ge=0, description="tries of a request after its first")
    retry_first_s: float = Field(default=0.5, gt=0, description="pause before the second try; it doubles")
    retry_longest_s: float = Field(default=30, gt=0, description="longest such pause, unless the server asks for more")


@dataclass(slots=True, eq=False)
class _Call:
    """A request, and the task that asks the server; `begun` when it no longer waits for a swap or a sleep to end."""

    request: Request
    begun: bool = False
    version: WeightsVersion = field(init=False)
    tokens: Tokens = field(default_factory=Tokens)
    asking: asyncio.Future[None] = field(init=False)


class OpenAIEngine:
    """`Engine` over HTTP."""

    def __init__(self, settings: OpenAISettings) -> None:
        self.version = WeightsVersion(0, 0, "")
        self._settings = settings
        policy = RetryPolicy(settings.retries, settings.retry_first_s, settings.retry_longest_s)
        self._servers = Servers(settings.urls, settings.served_model, policy)
        self._calls: set[_Call] = set()
        self._open = asyncio.Event()
        self._asleep = False
        self._swap_lock = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Wait for a server, and see that it returns what training needs.

        Raises `ConfigError` when it does not, `EngineDead` when none answers in time.
        """
        settings = self._settings
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await self._servers.start(settings.request_timeout_s, os.environ.get(API_KEY))
        except TimeoutError:
            await self.close()
            urls = ", ".join(settings.urls)
            raise EngineDead(f"{urls} was not ready within start_timeout_s = {settings.start_timeout_s:g} s") from None
        except ValueError as error:
            await self.close()
            raise ConfigError(f"engine 'openai': {error}") from error
        except BaseException:
            await self.close()
            raise
        self._open.set()

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`. Raises `ValueError` with the server's words for a request that it refuses (4xx),
        `RequestFailed` for one that it cannot answer while it answers others."""
        self._check_alive()
        tokens = token_limit(request, self._servers.context_tokens)
        call = _Call(request)
        call.version = self.version
        call.asking = asyncio.ensure_future(self._serve(call, tokens))
        self._calls.add(call)
        try:
            await asyncio.wait([call.asking])
        finally:
            call.asking.cancel()
            self._calls.discard(call)
        if not call.asking.cancelled():
            call.asking.result()
            return call.tokens.completion(call.version)
        self._check_alive()
        return call.tokens.completion(call.version, FinishReason.ABORT)

    async def _serve(self, call: _Call, tokens: int) -> None:
        await self._open.wait()
        self._check_alive()
        call.begun, call.version = True, self.version
        body = {**request_body(call.request, tokens, call.version), "stream": True}
        await self._servers.ask(body, call.request.session, call.tokens)

    async def swap(self, weights: Path, version: WeightsVersion, mode: SwapMode) -> float:
        """Note that the server serves `version` from now on; `weights` are not sent to it."""
        async with self._swap_lock:
            self._check_alive()
            if version.version and not self._settings.server_follows:
                raise WeightsError(
                    f"{self._settings.urls[0]} was not given the weights of version {version.version}: this engine "
                    "loads none. If something else loads every version into it before the trainer publishes it, set "
                    "server_follows = true in [worker.options]; else use an engine that loads weights"
                )
            if mode is SwapMode.ABORT:
                await self.abort([call.request for call in self._calls if call.begun and not call.request.must_finish])
            await self._drain(mode)
            self.version = version
            return 0.0

    async def abort(self, requests: Collection[Request]) -> None:
        """End requests with what has come of them; see `Engine.abort`."""
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
        await self._servers.close()

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
