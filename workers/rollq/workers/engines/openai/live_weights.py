"""Loads the weights that servers should serve, and checks that each server returns their logprobs.

Invariant: a server that passed `verify` holds the pushed weights, if any, and returns the logprobs in the live weights'
probe. Without a probe, servers into which weights were loaded agree with the first such server.
"""

import asyncio
import logging
from collections.abc import Sequence

import aiohttp

from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.values.rollouts import Float32Array, Int32Array
from rollq.buffer.weights.probe import Probe, probe_prompts
from rollq.workers.engines.openai.dialect import PROBE_IDS, Weights
from rollq.workers.engines.openai.server import Server, WrongWeights
from rollq.workers.engines.weights_check import WeightsCheck, compare
from rollq.workers.http.client import TransientError

log = logging.getLogger(__name__)

COMMON_TOKENS = 256
"""Every model has at least this many tokens. Checks without a published probe use only these tokens."""


class LiveWeights:
    """The weights that servers should serve. `pushed` is None if another program loads weights, or before the first
    push."""

    def __init__(self) -> None:
        self.pushed: Weights | None = None
        self._expected: Probe | None = None
        self._unchecked = LogOnce(log)

    def change(self, pushed: Weights | None, probe: Probe | None) -> None:
        """Make other weights live. No server has been verified with them."""
        self.pushed, self._expected = pushed, probe

    def check_name(self, name: str | None) -> None:
        """Raise `TransientError` unless `name`, from an answer, names the pushed weights."""
        if name is not None and self.pushed is not None and name != self.pushed.name:
            raise TransientError(f"its answer comes from weights {name!r}, not {self.pushed.name!r}")

    async def verify(self, http: aiohttp.ClientSession, server: Server) -> None:
        """Check that a server has the pushed weights, if any, and returns the live weights' logprobs.

        Concurrent callers share one check. Raises `TransientError`, `WrongWeights` or `ValueError`.
        """
        async with server.verifying:
            if self.pushed is not None and not server.weights_verified:
                if await server.dialect.weights.load(http, server.url, self.pushed):
                    server.checked = False
                server.weights_verified = True
            if not server.checked:
                server.check = await self._check(http, server)
                server.checked = True

    async def _check(self, http: aiohttp.ClientSession, server: Server) -> WeightsCheck | None:
        """Compare a server's logprobs with the expected ones. Raises `WrongWeights` if they differ.

        Returns None if the server returns no prompt logprobs, or if there is nothing to compare with.
        """
        if (self._expected is None and self.pushed is None) or not await self._scores(http, server):
            return None
        prompts = probe_prompts(COMMON_TOKENS) if self._expected is None else self._expected.prompts
        logprobs = await _score(http, server, prompts)
        if self._expected is None:
            self._expected = Probe(server.dtype, prompts, logprobs)
        check = compare(self._expected, logprobs, server.dtype)
        if not check.passed:
            raise WrongWeights(
                f"its logprobs are not the logprobs of the live weights: {check.difference:.2g} nats apart on average, "
                f"where {check.tolerance:g} are allowed (expected in {self._expected.dtype}, server {server.dtype})"
            )
        return check

    async def _scores(self, http: aiohttp.ClientSession, server: Server) -> bool:
        """Whether a server returns prompt logprobs. Logs once if it does not."""
        try:
            await server.score(http, PROBE_IDS)
        except ValueError as error:
            message = "%s gives no logprobs of prompts: its weights are served unchecked: %s"
            self._unchecked.warning(server.url, message, server.url, error)
            return False
        return True


async def _score(http: aiohttp.ClientSession, server: Server, prompts: Sequence[Int32Array]) -> Sequence[Float32Array]:
    """Each prompt's logprobs, from a server that returns them. Raises `WrongWeights` if the server refuses these
    prompts."""
    try:
        return await asyncio.gather(*(server.score(http, prompt) for prompt in prompts))
    except ValueError as error:
        raise WrongWeights(f"its weights cannot be checked: {error}") from error
