"""Collects the tokens of streamed answers, in any server's format. Pure: plain values in and out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rollq.buffer.values.rollouts import FinishReason, Float32Array, VersionSpan
from rollq.workers.engines.protocol import Completion, WeightsVersion, parse_reason


class Part(NamedTuple):
    """The new tokens in one event of an answer: ids, logprobs in nats, the finish reason if the answer has ended, and
    the weights' name if the server reports it."""

    ids: list[int]
    logprobs: list[float]
    reason: str | None = None
    weights: str | None = None


@dataclass(slots=True, eq=False)
class Tokens:
    """The part of a completion that has arrived: ids, logprobs in nats, and the finish reason if it has ended. `url` is
    the server's, for messages. `broken` is true if arrived tokens were lost when a server failed. `added` is called
    whenever tokens arrive."""

    url: str = "the server"
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    broken: bool = False
    added: Callable[[], None] | None = None

    def begin(self, url: str) -> None:
        """Start again with the server at `url`."""
        self.broken = self.broken or bool(self.ids)
        self.url, self.ids, self.logprobs, self.reason = url, [], [], None

    def add(self, part: Part) -> None:
        """Append a part."""
        self.ids += part.ids
        self.logprobs += part.logprobs
        self.reason = part.reason or self.reason
        if self.added is not None:
            self.added()

    def completion(self, version: WeightsVersion, reason: FinishReason | None = None) -> Completion:
        """The tokens as a completion from weights `version`, with the finish reason `reason` or the server's.

        Raises `ValueError` for invalid ids or logprobs.
        """
        try:
            ids, logprobs = np.array(self.ids, dtype=np.int32), float32_array(self.logprobs)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{self.url} returned token ids or logprobs that are not numbers: {error}") from error
        if ids.ndim != 1 or logprobs.shape != ids.shape or not np.isfinite(logprobs).all() or (ids < 0).any():
            raise ValueError(
                f"{self.url} returned {ids.shape} token ids and {logprobs.shape} logprobs, or invalid ones"
            )
        spans = (VersionSpan(version.epoch, version.version, len(ids)),) if len(ids) else ()
        return Completion(ids, logprobs, spans, parse_reason(self.reason) if reason is None else reason)


def float32_array(numbers: Sequence[float]) -> Float32Array:
    """An array of these numbers; numbers too large for float32 become infinite. Raises `TypeError` or `ValueError`."""
    with np.errstate(over="ignore"):
        return np.array(numbers, dtype=np.float32)


def join_parts(parts: Sequence[Completion], reason: FinishReason) -> Completion:
    """Join one answer's parts, in order, into one completion with finish reason `reason`."""
    if not parts:
        return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), reason)
    return Completion(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        tuple(span for part in parts for span in part.versions),
        reason,
    )
