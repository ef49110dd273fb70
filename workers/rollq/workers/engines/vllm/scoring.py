"""Checks vLLM's weights by the logprobs of given tokens, and its prompt cache by next-token logprobs with and without
the cache."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from rollq.buffer.errors import WeightsError
from rollq.buffer.values.rollouts import Float32Array, Int32Array
from rollq.buffer.weights.probe import probe_prompts
from rollq.workers.engines.protocol import WeightsVersion
from rollq.workers.engines.vllm.api import (
    name_of,
    next_token_parameters,
    prompt_logprobs,
    scoring_parameters,
    token_parameters,
)
from rollq.workers.engines.vllm.process import VllmProcess

PRIORITY = -1
"""Lower than any request's priority, so checks run first."""
SENT_S = 0.005
"""The seconds that requests may take to reach vLLM's process."""
CACHED_BLOCKS = 2
"""The length of the prompt that detects a stale cache, in vLLM's cache blocks. Only whole blocks are reused."""

COMPARED = 10
"""The number of likely next tokens to compare."""


class Served(NamedTuple):
    """The weights and the adapter for requests. `salt` separates cached prompts; by default, the weights determine
    it."""

    version: WeightsVersion
    adapter: Any = None
    salt: str = ""


class Scores(NamedTuple):
    """For each prompt, the logprobs float32 [T - 1] in nats of all tokens except the first; and the cache's error. See
    `Scorer` and `CachingEngine`."""

    logprobs: Sequence[Float32Array]
    cache_error: float


class PromptScores:
    """Scores prompts with one vLLM. A check scores the same prompts at every version."""

    def __init__(self, process: VllmProcess) -> None:
        config = process.llm.vllm_config
        self._process = process
        self._names = (f"rollq-score-{number}" for number in count())
        self._probes = probe_prompts(int(config.model_config.get_vocab_size()))
        tokens = CACHED_BLOCKS * int(config.cache_config.block_size) + 1
        self._long = np.resize(np.concatenate(self._probes), tokens)
        self._caches = bool(config.cache_config.enable_prefix_caching) and tokens < config.model_config.max_model_len
        allowed = int(config.model_config.max_logprobs)
        self._compared = COMPARED if allowed < 0 else min(COMPARED, allowed)
        self._queued: asyncio.Task[Scores] | None = None
        self._queued_for: Served | None = None

    async def queue(self, version: WeightsVersion) -> None:
        """Queue the check's prompts before all requests, while vLLM is paused.

        If vLLM is full, prompts queued later would wait for requests to end.
        """
        self.cancel()
        self._queued_for = Served(version)
        self._queued = asyncio.create_task(self._check(self._queued_for))
        self._queued.add_done_callback(lambda done: done.cancelled() or done.exception())  # even if nobody awaits it
        await asyncio.sleep(SENT_S)

    def cancel(self) -> None:
        """Forget the queued prompts."""
        if self._queued is not None:
            self._queued.cancel()
        self._queued = self._queued_for = None

    async def score(self, prompts: Sequence[Int32Array], served: Served) -> Sequence[Float32Array]:
        """See `Scorer.score`. Raises `WeightsError` for prompts that vLLM refuses."""
        if self._queued is not None and self._queued_for == served and self._are_queued(prompts):
            return (await self._queued).logprobs
        return await self._score_all(prompts, served)

    def _are_queued(self, prompts: Sequence[Int32Array]) -> bool:
        return len(prompts) == len(self._probes) and all(map(np.array_equal, prompts, self._probes))

    async def cache_error(self, served: Served) -> float:
        """See `CachingEngine.cache_error`; 0 without a prompt cache."""
        if self._queued is not None and self._queued_for == served:
            return (await self._queued).cache_error
        return await self._cache_error(served)

    async def _check(self, served: Served) -> Scores:
        logprobs, error = await asyncio.gather(self._score_all(self._probes, served), self._cache_error(served))
        return Scores(logprobs, error)

    async def _score_all(self, prompts: Sequence[Int32Array], served: Served) -> Sequence[Float32Array]:
        score = self._score_token_by_token if self._process.max_adapters else self._score
        return await asyncio.gather(*(score(prompt, served) for prompt in prompts))

    async def _score(self, prompt: Int32Array, served: Served) -> Float32Array:
        return prompt_logprobs(prompt.tolist(), await self._ask(prompt, scoring_parameters(), served))

    async def _score_token_by_token(self, prompt: Int32Array, served: Served) -> Float32Array:
        """Like `_score`, with one request per token: on the CPU, logprobs of a whole prompt with an adapter kill
        vLLM."""
        asking = (self._logprob(prompt[:end], int(prompt[end]), served) for end in range(1, len(prompt)))
        return np.array(await asyncio.gather(*asking), dtype=np.float32)

    async def _logprob(self, prompt: Int32Array, token: int, served: Served) -> float:
        """The logprob of a next token, in nats."""
        output = await self._ask(prompt, token_parameters(token), served)
        return float(output.outputs[0].logprobs[0][token].logprob)

    async def _cache_error(self, served: Served) -> float:
        if not self._caches:
            return 0.0
        fresh_salt = served._replace(salt=next(self._names))  # no cached prompt has it
        cached, fresh = await asyncio.gather(self._next_token(served), self._next_token(fresh_salt))
        apart = [abs(logprob - fresh[token]) for token, logprob in cached.items() if token in fresh]
        return sum(apart) / len(apart) if apart else float("inf")

    async def _next_token(self, served: Served) -> Mapping[int, float]:
        """The logprobs in nats of the most likely tokens after the long prompt."""
        output = await self._ask(self._long, next_token_parameters(self._compared), served)
        return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}

    async def _ask(self, prompt: Int32Array, parameters: Any, served: Served) -> Any:
        inputs = tokens_input(prompt.tolist(), cache_salt=served.salt or name_of(served.version))
        answers = self._process.llm.generate(
            inputs, parameters, next(self._names), lora_request=served.adapter, priority=PRIORITY
        )
        try:
            (output,) = [answer async for answer in answers]
        except EngineDeadError as error:
            raise self._process.failed(f"vLLM died: {error}") from error
        except EngineGenerateError as error:  # the prompts are valid, so vLLM may be about to die
            raise self._process.failed(f"vLLM broke: {error.__cause__!r}") from error
        except VLLMClientError as error:
            raise WeightsError(f"vLLM refuses the prompts that check its weights: {error}") from error
        return output
