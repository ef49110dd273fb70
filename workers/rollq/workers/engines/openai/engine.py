"""An engine over HTTP: servers with OpenAI's completions API that return token ids, such as vLLM's.

Token ids go in as the prompt; `token_ids` and `logprobs` come out (vLLM's `return_token_ids`). Engines for other kinds
of servers differ only in their `dialect`. The settings decide how weights are loaded:

- with `push_model`, this engine loads them. Invariant: servers have no requests while they load weights, so every
  token is of the version that the engine served when it sent the request. In mode `keep`, requests are interrupted, and
  continue after the swap from the tokens that have arrived.
- with `server_follows`, another program loads them. `swap` notes the version, and all of a request's tokens carry the
  version at its start.
- otherwise weights never change: only version 0, with which the servers were started, is accepted.

A request that fails because of a server is retried, on another server or after growing pauses. After the last try, the
engine probes the servers that get requests with the simplest request: if one answers, only the failed request fails;
otherwise, the engine is dead.
"""

import asyncio
import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Annotated, ClassVar, Self

import aiohttp
import numpy as np
from pydantic import Field, model_validator

from rollq.buffer.common.matching import HTTP_URL
from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.values.rollouts import FinishReason
from rollq.buffer.weights.probe import Probe
from rollq.workers.engines.gate import Call, Gated, RequestGate
from rollq.workers.engines.limits import check_supported, token_limit
from rollq.workers.engines.openai import completions_api, weight_push
from rollq.workers.engines.openai.dialect import NO_VERSION, Description, Dialect, Weights
from rollq.workers.engines.openai.server import WrongWeights
from rollq.workers.engines.openai.servers import Servers
from rollq.workers.engines.openai.tokens import Tokens, join_parts
from rollq.workers.engines.protocol import REPORT_TOKENS, Completion, EngineDead, Request, SwapMode, WeightsVersion
from rollq.workers.engines.tensors import read_model
from rollq.workers.engines.weights_check import WeightsCheck, WeightsLate, WeightsRejected
from rollq.workers.http.client import exchange
from rollq.workers.http.settings import RetrySettings
from rollq.workers.seeds import turn_seed

log = logging.getLogger(__name__)

API_KEY = "ROLLQ_ENGINE_API_KEY"
"""The environment variable with the servers' key, if they need one."""


class ServerSettings(RetrySettings):
    """Where the servers are, and how long to wait and retry."""

    urls: tuple[Annotated[str, HTTP_URL], ...] = Field(
        min_length=1, description="base of the API of each server, such as http://127.0.0.1:8000/v1"
    )
    server_follows: bool = Field(
        default=False, description="another program loads each published version into the servers"
    )
    push_model: Path | None = Field(
        default=None, description="folder of the model served: each version is loaded into the servers"
    )
    request_timeout_s: float = Field(default=600, gt=0, description="longest wait for one answer")
    start_timeout_s: float = Field(default=600, gt=0, description="longest wait for a server that is still starting")
    retries: int = Field(default=8, ge=0, description="retries of a request")

    LONGEST_PAUSE_S: ClassVar[float] = 30.0

    @model_validator(mode="after")
    def _one_loads(self) -> Self:
        if self.push_model is not None and self.server_follows:
            raise ValueError(
                "push_model loads weights into the servers, server_follows says that another program does: set one of "
                "them"
            )
        return self

    @property
    def model_name(self) -> str | None:
        """The model to ask for if servers have several models."""
        return None


class OpenAISettings(ServerSettings):
    """Servers with OpenAI's completions API."""

    served_model: str | None = Field(default=None, description="name at the server; default: the only one it serves")

    @property
    def model_name(self) -> str | None:
        """The model to ask for if servers have several models."""
        return self.served_model


async def describe(http: aiohttp.ClientSession, url: str, model: str | None, *, pushes: bool) -> Description:
    """See `Describe`. Only servers that take weights report their dtype and number of sequences."""
    name, context_tokens = completions_api.choose_model(await exchange(http, "GET", f"{url}/models", None), model)
    if not pushes:
        return Description(name, context_tokens)
    dtype, sequences = await weight_push.dtype_of(http, url), await weight_push.max_sequences_of(http, url)
    return Description(name, context_tokens, dtype, sequences)


OPENAI = Dialect("openai", completions_api, weight_push, describe)


@dataclass(slots=True, eq=False)
class _Call(Call):
    """A request, the parts of its answer from before interruptions, and the tokens that have arrived since."""

    tokens_left: int = 0
    parts: list[Completion] = field(default_factory=list)
    tokens: Tokens = field(default_factory=Tokens)
    reported: int = 0

    def end_part(self, reason: FinishReason | None = None) -> FinishReason:
        """Keep the tokens that have arrived, and return their finish reason. Raises `ValueError` if they are
        malformed."""
        part = self.tokens.completion(self.version or NO_VERSION, reason)  # a call without a version has no tokens
        self.parts.append(part)
        self.tokens_left -= len(part.ids)
        self.tokens = Tokens(broken=self.tokens.broken)
        return part.finish_reason

    def report(self) -> None:
        """Report the tokens if enough are new. Tokens after a broken try are not reported, since they need not continue
        that try's reported tokens."""
        report, new = self.request.report, self.tokens
        tokens = len(new.ids) + sum(len(part.ids) for part in self.parts)
        if report is None or new.broken or new.reason is not None or tokens - self.reported < REPORT_TOKENS:
            return
        self.reported = tokens
        part = new.completion(self.version or NO_VERSION, FinishReason.ABORT)
        report(join_parts([*self.parts, part], FinishReason.ABORT))

    def rest(self) -> Request:
        """The remaining request: the request itself, or its continuation after the parts."""
        request = self.request
        if not self.parts:
            return request
        made = [part.ids for part in self.parts]
        ids = np.concatenate(made if request.prefix_ids is None else [request.prefix_ids, *made])
        seed = request.sampling.seed
        sampling = replace(request.sampling, seed=None if seed is None else turn_seed(seed, len(self.parts)))
        return replace(request, prefix_ids=ids, sampling=sampling)


class OpenAIEngine(Gated):
    """`Engine` over HTTP."""

    dialect: ClassVar[Dialect] = OPENAI

    def __init__(self, settings: ServerSettings) -> None:
        self.version = NO_VERSION
        self._settings = settings
        pushes = settings.push_model is not None
        self._servers = Servers(self.dialect, settings.urls, settings.model_name, settings.retry_policy, pushes=pushes)
        self._gate: RequestGate[_Call] = RequestGate()
        self._probe: Probe | None = None
        self._rejected = False

    @property
    def max_sequences(self) -> int:
        """See `BoundedEngine`."""
        return self._servers.max_sequences

    async def start(self) -> None:
        """Wait for a server, and check that it returns the values that training needs.

        Raises `ConfigError` when it does not, and `EngineDead` when no server answers in time.
        """
        settings = self._settings
        if self.dialect.warning is not None:
            log.warning("engine %r: %s", self.dialect.engine, self.dialect.warning)
        try:
            if settings.push_model is not None:
                self._model = await asyncio.to_thread(read_model, settings.push_model)
            async with asyncio.timeout(settings.start_timeout_s):
                await self._servers.start(settings.request_timeout_s, os.environ.get(API_KEY))
        except TimeoutError:
            await self.close()
            urls = ", ".join(settings.urls)
            raise EngineDead(f"{urls} was not ready within start_timeout_s = {settings.start_timeout_s:g} s") from None
        except (ValueError, WeightsError) as error:
            await self.close()
            raise ConfigError(f"engine {self.dialect.engine!r}: {error}") from error
        except BaseException:
            await self.close()
            raise
        self._gate.start()

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`. Raises `ValueError`, with the server's message, for a request that it refuses (4xx),
        and `RequestFailed` for a request that fails while others succeed."""
        check_supported(request.sampling, self.dialect.engine)
        call = _Call(request, tokens_left=token_limit(request, self._servers.context_tokens))
        return join_parts(call.parts, await self._finish(call))

    async def _finish(self, call: _Call) -> FinishReason:
        """Ask until the request has ended, again after each interruption, and return the finish reason."""
        while True:
            await self._gate.serve(call, self._ask)
            if call.tokens.reason is not None:
                return call.end_part()
            reason = call.end_part(FinishReason.ABORT)
            if call.aborted:
                return reason

    async def _ask(self, call: _Call) -> None:
        """Collect the answer in the call's tokens. Collect nothing while no server serves the right weights."""
        call.version = self.version
        if self._rejected:
            call.tokens.reason = FinishReason.ABORT
            return
        if call.request.report is not None:
            call.tokens.added = call.report
        body = {**self.dialect.api.request_body(call.rest(), call.tokens_left, call.version), "stream": True}
        await self._servers.ask(body, call.request.session, call.tokens)

    @property
    def check(self) -> WeightsCheck | None:
        """See `SelfChecking.check`."""
        checks = [server.check for server in self._servers.serving if server.check is not None]
        return max(checks, key=lambda check: check.difference, default=None)

    def expect(self, probe: Probe | None) -> None:
        """See `SelfChecking.expect`."""
        self._probe = probe

    async def swap(self, weights: Path, version: WeightsVersion, mode: SwapMode) -> float:
        """Load `weights` into the servers, or note that they serve `version` from now on; see `Engine.swap`.

        Raises `WeightsError` as `Engine.swap` does and when no server can read the folder, `WeightsRejected` when every
        server returns wrong logprobs (`WeightsLate` if another program loads the weights), and `EngineDead` when no
        server took the weights.
        """
        async with self._gate.swap():
            probe, self._probe = self._probe, None
            if self._settings.push_model is not None:
                return await self._push(weights, version, mode, probe)
            if version.version and not self._settings.server_follows:
                raise WeightsError(
                    f"{self._settings.urls[0]} was not given the weights of version {version.version}: this engine "
                    "loads none. In [worker.options], set push_model to have it load each version into the servers, or "
                    "server_follows = true if something else loads it before the trainer publishes it; or use an "
                    "engine that loads weights"
                )
            async with self._gate.closed(mode):
                return await self._serve(None, version, probe)

    async def _push(self, folder: Path, version: WeightsVersion, mode: SwapMode, probe: Probe | None) -> float:
        weights = Weights(folder.absolute(), version, self._model.copies)
        await asyncio.to_thread(self._model.check, folder)
        await self._servers.check(weights)
        async with self._gate.closed(mode, interrupt=True):
            await self._servers.check(weights)  # the folder may have been removed while requests ended
            return await self._serve(weights, version, probe)

    async def _serve(self, weights: Weights | None, version: WeightsVersion, probe: Probe | None) -> float:
        """Make the servers serve `version`; without `weights`, they have already loaded that version. Returns the
        duration in seconds."""
        limit_s, started_s = self._settings.start_timeout_s, monotonic()
        try:
            async with asyncio.timeout(limit_s):
                await self._servers.serve(weights, probe)
        except asyncio.CancelledError:
            self._gate.fail("a swap was cancelled half-way")
            raise
        except WrongWeights as error:
            self.version, self._rejected = version, True
            rejected = WeightsLate if weights is None else WeightsRejected
            raise rejected(f"no server serves the weights of version {version.version} correctly: {error}") from error
        except (TimeoutError, ValueError) as error:
            reason = f"no server took the weights of version {version.version} within {limit_s:g} s: {error}"
            self._gate.fail(reason)
            raise EngineDead(reason) from error
        self.version, self._rejected = version, False
        return monotonic() - started_s

    async def close(self) -> None:
        """Close the connections to the servers; running requests end with `EngineDead`."""
        self._gate.fail("the engine is closed")
        await self._servers.close()
