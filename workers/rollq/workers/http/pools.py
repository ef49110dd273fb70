"""Auxiliary models, such as a judge, a reference or a teacher: named pools of servers.

Judges ask a pool for text. As a scorer, a pool returns logprobs per token. A sample carries its response tokens'
logprobs as the named array `<pool>_logprobs` and, with `top_k`, the likeliest tokens as `<pool>_top_ids` and
`<pool>_top_logprobs`.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.common.matching import HTTP_URL
from rollq.buffer.values.rollouts import Float32Array, Int32Array, Sample, Segment
from rollq.workers.http.settings import HttpClientSettings

log = logging.getLogger(__name__)


class PoolSettings(HttpClientSettings):
    """Servers of one model with OpenAI's API, and with `prompt_logprobs` for scorers, such as vLLM servers."""

    urls: tuple[Annotated[str, HTTP_URL], ...] = Field(
        min_length=1, description="base of the API of each server, such as http://127.0.0.1:8000/v1"
    )
    served_model: str = Field(description="name of the model at the servers")
    top_k: int = Field(
        default=0, ge=0, description="as a scorer: likeliest tokens of each position that have logprobs as well"
    )


class ModelPool:
    """The servers of one auxiliary model. Their key, if they need one, is in `ROLLQ_POOL_<NAME>_API_KEY`."""

    def __init__(self, name: str, settings: PoolSettings) -> None:
        """Raises `ConfigError` if a required package is missing."""
        key = f"ROLLQ_POOL_{name.upper()}_API_KEY"
        self._name = name
        self._model = settings.served_model
        self._top_k = settings.top_k
        self._failures = LogOnce(log)
        self._caller = settings.caller(settings.urls, key)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> str:
        """The model's answer to a conversation. `sampling` is sent to the servers unchanged: `max_tokens=512`,
        `temperature=0.0`.

        Raises `ValueError` if the server refuses or returns no text, and `TransientError` if all tries failed.
        """
        body = {"model": self._model, "messages": messages, **sampling}
        answer = await self._caller.post(body, "/chat/completions")
        try:
            text = answer["choices"][0]["message"]["content"]
        except (LookupError, TypeError) as error:
            raise ValueError(f"no message in {answer!r:.200}") from error
        if not isinstance(text, str):
            raise ValueError(f"no text in {answer!r:.200}")
        return text

    async def score(self, prompt_ids: Int32Array, response_ids: Int32Array) -> dict[str, Int32Array | Float32Array]:
        """The arrays for `response_ids` [R] after `prompt_ids` [P], by name; logprobs are in nats, at temperature 1.

        `<pool>_logprobs` float32 [R] holds the response tokens' logprobs. With `top_k`, `<pool>_top_ids` int32 [R, k]
        holds each position's likeliest tokens, the likeliest first, and `<pool>_top_logprobs` float32 [R, k] holds
        their logprobs. The model's context must have room for P + R + 1 tokens. Raises `ValueError` when the server
        refuses or returns fewer logprobs, and `TransientError` when all tries failed.
        """
        ids = np.concatenate([prompt_ids, response_ids])
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "prompt_logprobs": self._top_k,
        }
        answer = await self._caller.post(body, "/completions")
        arrays: dict[str, Int32Array | Float32Array] = {
            f"{self._name}_logprobs": read_logprobs(answer, ids, len(prompt_ids))
        }
        if self._top_k:
            top_ids, top_logprobs = read_top_logprobs(answer, len(prompt_ids), len(response_ids), self._top_k)
            arrays |= {f"{self._name}_top_ids": top_ids, f"{self._name}_top_logprobs": top_logprobs}
        return arrays

    def log_failure(self, error: BaseException) -> None:
        """Log the reason why scoring failed, once per exception type."""
        message = "pool %s failed; its samples keep the error, and more of this type are not logged"
        self._failures.warning(type(error).__name__, message, self._name, exc_info=error)

    async def close(self) -> None:
        """Close the connections."""
        await self._caller.close()


def read_logprobs(answer: Any, ids: Int32Array, start: int) -> Float32Array:
    """The logprobs of `ids[start:]` in a server's answer. Raises `ValueError` unless each id has a logprob."""
    logprobs = read_prompt_logprobs(answer, ids, start)
    if not np.isfinite(logprobs).all():
        raise ValueError("some prompt_logprobs are not finite")
    return logprobs


def read_prompt_logprobs(answer: Any, ids: Int32Array, start: int) -> Float32Array:
    """Like `read_logprobs`, but keeps logprobs that are not finite."""
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        if len(entries) != len(ids):
            raise ValueError(f"{len(entries)} entries for {len(ids)} tokens")
        values = [entries[index][str(ids[index])]["logprob"] for index in range(start, len(ids))]
        return np.array(values, dtype=np.float32)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"no prompt_logprobs for every token ({type(error).__name__}: {error}) in {answer!r:.200}"
        ) from error


def read_top_logprobs(answer: Any, start: int, count: int, top_k: int) -> tuple[Int32Array, Float32Array]:
    """The ids and logprobs [count, top_k] of the likeliest tokens at `count` positions from `start` on.

    A server also lists the position's actual token, which may be less likely. Raises `ValueError` when a position has
    fewer than `top_k` tokens.
    """
    ids, logprobs = np.empty((count, top_k), np.int32), np.empty((count, top_k), np.float32)
    entries = answer["choices"][0]["prompt_logprobs"][start : start + count]
    for row, entry in enumerate(entries):
        candidates = ((float(info["logprob"]), int(token)) for token, info in entry.items())
        likeliest = sorted(candidates, reverse=True)[:top_k]
        if len(likeliest) < top_k:
            raise ValueError(f"{len(likeliest)} prompt_logprobs at a position where top_k asks for {top_k}")
        logprobs[row], ids[row] = zip(*likeliest, strict=True)
    return ids, logprobs


async def score(sample: Sample, pools: Mapping[str, ModelPool], names: Sequence[str]) -> Sample:
    """Add these pools' arrays to every segment of the sample. Raises `ValueError` with the pool's name."""
    if not names:
        return sample

    async def scored(segment: Segment) -> Segment:
        requests = (pools[name].score(segment.prompt_ids, segment.response_ids) for name in names)
        results = await asyncio.gather(*requests, return_exceptions=True)
        arrays = dict(segment.arrays)
        for name, returned in zip(names, results, strict=True):
            if isinstance(returned, BaseException):
                pools[name].log_failure(returned)
                raise ValueError(f"pool {name!r}: {returned}") from returned
            arrays |= returned
        return replace(segment, arrays=arrays)

    return replace(sample, segments=tuple([await scored(segment) for segment in sample.segments]))
