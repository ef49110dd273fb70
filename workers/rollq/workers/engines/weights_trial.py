"""Weights on trial: an engine is loading or has loaded the weights, and their check has not ended.

Invariant: tokens from weights that failed their trial never leave the engine's host. Tokens from weights on trial are
held back until the trial has ended.
"""

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from rollq.buffer.values.rollouts import FinishReason, VersionSpan
from rollq.workers.engines.protocol import Completion, WeightsVersion

Version = tuple[int, int]
"""Epoch and version."""


class Trials:
    """The weights on trial, and the weights that failed."""

    def __init__(self) -> None:
        self._on_trial: dict[Version, asyncio.Event] = {}
        self._failed: set[Version] = set()

    def begin(self, version: WeightsVersion) -> None:
        """Hold back the tokens of a version that the engine is about to load."""
        self._failed.discard(version[:2])
        self._on_trial[version[:2]] = asyncio.Event()

    def end(self, version: WeightsVersion, *, passed: bool) -> None:
        """Release the tokens, or drop them."""
        if not passed:
            self._failed.add(version[:2])
        self._on_trial.pop(version[:2]).set()

    def trusts(self, versions: Collection[VersionSpan]) -> bool:
        """Whether tokens of these versions may leave now."""
        return not any(_of(span) in self._on_trial or _of(span) in self._failed for span in versions)

    def holds(self, version: WeightsVersion) -> bool:
        """Whether a version is on trial."""
        return version[:2] in self._on_trial

    async def sift(self, completion: Completion) -> Completion:
        """Wait for trials to end, and return the completion up to the first token from failed weights."""
        for span in completion.versions:
            if (trial := self._on_trial.get(_of(span))) is not None:
                await trial.wait()
        return before(completion, self._failed)


def before(completion: Completion, failed: Collection[Version]) -> Completion:
    """The completion up to the first token of a `failed` version; its finish reason is `abort` if tokens are cut
    off."""
    tokens = 0
    for number, span in enumerate(completion.versions):
        if _of(span) in failed:
            return replace(
                completion,
                ids=completion.ids[:tokens],
                logprobs=completion.logprobs[:tokens],
                versions=completion.versions[:number],
                finish_reason=FinishReason.ABORT,
                arrays={name: _cut(array, len(completion.ids), tokens) for name, array in completion.arrays.items()},
            )
        tokens += span.tokens
    return completion


def _cut(array: npt.NDArray[Any], tokens: int, left: int) -> npt.NDArray[Any]:
    """The array's entries for the first `left` of `tokens` response tokens.

    In an array over prompt and response, an entry comes from the pass that read the token and generated the next one,
    so the new last token's entry becomes unknown.
    """
    entries = array[: len(array) - tokens + left].copy()
    if len(array) > tokens:
        entries[-1:] = 0
    return entries


def _of(span: VersionSpan) -> Version:
    return span.epoch, span.version
