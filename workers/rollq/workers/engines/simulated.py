"""An engine without a model, for load tests: it replays a table of response lengths at a set speed.

Invariant: aborts, swaps and version spans work as in any `Engine`, with a clock instead of a model.
"""

import asyncio
import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from rollq.buffer.rules.settings import Settings
from rollq.buffer.values.rollouts import FinishReason, Int32Array
from rollq.workers.engines.gate import Call, Gated, RequestGate
from rollq.workers.engines.limits import token_limit
from rollq.workers.engines.protocol import REPORT_TOKENS, Completion, Request, SwapMode, WeightsVersion
from rollq.workers.engines.shared_speed import Running, SharedSpeed
from rollq.workers.engines.version_spans import version_spans
from rollq.workers.tokenizers.byte import EOS_ID

FILLER_ID = 0
"""The id of every token except a finished response's last."""
LOGPROB = -1.0
"""The logprob of every token, in nats."""
CONTEXT_TOKENS = 131_072
"""The largest number of tokens in prompt and response together."""
SEED = 0
"""The seed for the order in which requests get lengths."""


class SimulatedSettings(Settings):
    """Which response lengths are replayed, and how fast: each sequence at `tokens_per_s`, or slower if all of them
    together would exceed `most_tokens_per_s`, as on a GPU."""

    lengths: tuple[PositiveInt, ...] = Field(default=(128,), min_length=1, description="response lengths, EOS included")
    tokens_per_s: float = Field(default=50.0, gt=0, description="speed of one sequence")
    most_tokens_per_s: float | None = Field(
        default=None, gt=0, description="speed of all sequences together, shared evenly; unset: no limit"
    )
    max_sequences: PositiveInt | None = Field(
        default=None, description="sequences that run at a time; more wait, by priority and arrival; unset: no limit"
    )
    by_prompt: bool = Field(default=False, description="the same prompt always gets an answer of the same length")

    REMOVED: ClassVar[Mapping[str, str]] = {
        "seed": "the lengths are taken in the same random order in each run; leave it out",
        "logprob": "every token has the logprob -1; leave it out",
        "context_tokens": "prompt and response together have at most 131072 tokens; leave it out",
    }


@dataclass(slots=True, eq=False)
class _Call(Call):
    """A request that makes `tokens` new tokens unless it is stopped. `swaps` holds pairs (version, tokens made before
    the swap to it)."""

    tokens: int = 0
    started: "asyncio.Future[None]" = field(init=False)
    sequence: Running | None = None
    swaps: list[tuple[WeightsVersion, int]] = field(default_factory=list)


class SimulatedEngine(Gated):
    """`Engine` over a clock: the i-th request takes the table's i-th length, in a random order that is the same in each
    run.

    With `by_prompt`, the prompt decides the length, so a sample that is generated again keeps its length.
    """

    def __init__(self, settings: SimulatedSettings) -> None:
        self.version = WeightsVersion(0, 0, "")
        self._settings = settings
        self._lengths = random.Random(SEED).sample(settings.lengths, len(settings.lengths))
        self._arrivals = count()
        self.max_sequences = settings.max_sequences
        self._speed = SharedSpeed(settings.tokens_per_s, settings.most_tokens_per_s)
        self._waiting: list[tuple[int, int, _Call]] = []
        self._queued = count()
        self._gate: RequestGate[_Call] = RequestGate(opened=self._start_waiting)

    async def start(self) -> None:
        """Take requests; there is nothing to load."""
        self._gate.start()

    async def generate(self, request: Request) -> Completion:
        """Wait until the tokens would be made; see `Engine.generate`."""
        tokens, finish_reason = self._plan(request)
        call = _Call(request, tokens=tokens)
        if await self._gate.serve(call, self._pass_time):
            return self._complete(call, tokens, finish_reason)
        return self._complete(call, self._made(call), FinishReason.ABORT)

    async def _pass_time(self, call: _Call) -> bool:
        call.started = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (call.request.priority, next(self._queued), call))
        self._start_waiting()
        try:
            await call.started
            if call.request.report is not None:
                for made in range(REPORT_TOKENS, call.tokens, REPORT_TOKENS):
                    await self._until(call, made)
                    call.request.report(self._complete(call, made, FinishReason.ABORT))
            await self._until(call, call.tokens)
        finally:
            if call.sequence is not None:
                self._speed.stop(call.sequence)
            self._start_waiting()
        return True

    async def _until(self, call: _Call, tokens: int) -> None:
        """Wait until a call that has started has made `tokens` tokens."""
        assert call.sequence is not None
        await self._speed.reach(call.sequence, tokens)

    def _start_waiting(self) -> None:
        """Start waiting requests while the gate is open and there is room."""
        while self._waiting and self._gate.is_open and self._has_place():
            _, _, call = heapq.heappop(self._waiting)
            if not call.started.done():  # cancelled
                call.sequence = self._speed.start(call.tokens)
                call.version = self.version
                call.swaps.append((self.version, 0))
                call.started.set_result(None)

    def _has_place(self) -> bool:
        return self.max_sequences is None or self._speed.running < self.max_sequences

    async def swap(self, weights: Path, version: WeightsVersion, mode: SwapMode) -> float:
        """Report `version` from now on; `weights` are not read."""
        async with self._gate.swap(), self._gate.closed(mode):
            for call in self._gate.running:
                call.swaps.append((version, self._made(call)))
            self.version = version
        return 0.0

    async def close(self) -> None:
        """Stop; running requests end with `EngineDead`."""
        self._gate.fail("the engine is closed")

    def _plan(self, request: Request) -> tuple[int, FinishReason]:
        """The number of new tokens, and the finish reason."""
        limit = token_limit(request, CONTEXT_TOKENS)
        prefix_tokens = 0 if request.prefix_ids is None else len(request.prefix_ids)
        length = max(1, self._length_of(request) - prefix_tokens)
        return (length, FinishReason.STOP) if length <= limit else (limit, FinishReason.LENGTH)

    def _length_of(self, request: Request) -> int:
        """The length of the whole response, including the prefix."""
        if self._settings.by_prompt:
            return length_of(request.prompt_ids, self._settings.lengths)
        return self._lengths[next(self._arrivals) % len(self._lengths)]

    def _complete(self, call: _Call, tokens: int, finish_reason: FinishReason) -> Completion:
        ids = np.full(tokens, FILLER_ID, dtype=np.int32)
        if finish_reason is FinishReason.STOP:
            ids[-1] = EOS_ID
        logprobs = np.full(tokens, LOGPROB, dtype=np.float32)
        return Completion(ids, logprobs, version_spans(call.swaps, tokens), finish_reason)

    def _made(self, call: _Call) -> int:
        """The number of tokens that an unfinished call has made, except its last token; 0 before the call has
        started."""
        if call.sequence is None:
            return 0
        return min(int(self._speed.made(call.sequence)), call.tokens - 1)


def length_of(prompt_ids: Int32Array, lengths: Sequence[int]) -> int:
    """The element of `lengths` for the prompt int32 [P]; the same on every machine."""
    drawn = blake2b(prompt_ids.astype("<i4").tobytes(), digest_size=8, key=str(SEED).encode()).digest()
    return lengths[int.from_bytes(drawn) % len(lengths)]
