"""An engine that generates nothing: it replays a table of response lengths at a set speed, for load tests.

Invariant: everything that `Engine` promises about aborts, swaps and version spans holds, with time in place of a model.
"""

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from pathlib import Path

import numpy as np
from pydantic import Field, PositiveInt

from rollq.buffer.rollouts import FinishReason, Int32Array
from rollq.buffer.settings import Settings
from rollq.workers.engines.limits import token_limit
from rollq.workers.engines.protocol import Completion, EngineDead, Request, SwapMode, WeightsVersion
from rollq.workers.engines.spans import version_spans

FILLER_ID = 0
"""Id of every token except the last of a finished response."""
EOS_ID = 1


class SimulatedSettings(Settings):
    """What is replayed, and how fast."""

    lengths: tuple[PositiveInt, ...] = Field(default=(128,), min_length=1, description="response lengths, EOS included")
    tokens_per_s: float = Field(default=50.0, gt=0, description="speed of one sequence")
    seed: int = Field(default=0, description="order in which the lengths are taken")
    by_prompt: bool = Field(default=False, description="the same prompt always gets an answer of the same length")
    logprob: float = Field(default=-1.0, le=0, description="logprob of every token, nats")
    context_tokens: int = Field(default=131_072, gt=1)


@dataclass(slots=True, eq=False)
class _Run:
    """One request, waiting or under way. It makes `tokens` new tokens; `swaps` holds (version, tokens made before it).

    `news` is set when the engine opens, for one that waits, or when it is aborted.
    """

    request: Request
    tokens: int
    started_s: float = 0.0
    swaps: list[tuple[WeightsVersion, int]] = field(default_factory=list)
    aborted: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class SimulatedEngine:
    """`Engine` over a clock: the i-th request takes the i-th length of the table, shuffled by the seed.

    With `by_prompt` its prompt decides, so that one that is made again is as long as before.
    """

    def __init__(self, settings: SimulatedSettings) -> None:
        self.version = WeightsVersion(0, 0, "")
        self._settings = settings
        self._lengths = random.Random(settings.seed).sample(settings.lengths, len(settings.lengths))
        self._arrivals = count()
        self._waiting: set[_Run] = set()
        self._running: set[_Run] = set()
        self._swap_lock = asyncio.Lock()
        self._swapping = False
        self._asleep = False
        self._closed = False

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(self, request: Request) -> Completion:
        """Wait for as long as the tokens take; see `Engine.generate`."""
        tokens, finish_reason = self._plan(request)
        run = _Run(request, tokens)
        if not await self._begin(run):
            return self._complete(run, 0, FinishReason.ABORT)
        try:
            async with asyncio.timeout(tokens / self._settings.tokens_per_s):
                await run.news.wait()
        except TimeoutError:
            return self._complete(run, tokens, finish_reason)
        finally:
            self._running.discard(run)
            run.ended.set()
        self._check_alive()
        return self._complete(run, run.tokens, FinishReason.ABORT)

    async def _begin(self, run: _Run) -> bool:
        """Wait until the engine takes requests. False when it is aborted before."""
        self._waiting.add(run)
        try:
            while (self._swapping or self._asleep) and not (self._closed or run.aborted):
                run.news.clear()
                await run.news.wait()
        finally:
            self._waiting.discard(run)
        self._check_alive()
        if run.aborted:
            return False
        run.news.clear()
        run.started_s = self._now_s()
        run.swaps.append((self.version, 0))
        self._running.add(run)
        return True

    async def swap(self, weights: Path, version: WeightsVersion, mode: SwapMode) -> float:
        """Count as `version` from now on; `weights` are not read."""
        async with self._swap_lock:
            self._check_alive()
            if mode is SwapMode.ABORT:
                await self.abort([run.request for run in self._running if not run.request.must_finish])
            await self._drain([run for run in self._running if mode is SwapMode.WAIT or _holds(run)])
            for run in self._running:
                if not run.aborted:
                    run.swaps.append((version, self._made(run)))
            self.version = version
            return 0.0

    async def _drain(self, runs: Collection[_Run]) -> None:
        """Let `runs` end while new requests wait."""
        self._swapping = bool(runs)
        try:
            for run in runs:
                await run.ended.wait()
        finally:
            self._swapping = False
            self._tell_waiting()
        self._check_alive()

    async def abort(self, requests: Collection[Request]) -> None:
        """See `Engine.abort`."""
        wanted = set(requests)
        for run in [*self._running, *self._waiting]:
            if run.request in wanted and not run.aborted:
                run.aborted = True
                run.tokens = self._made(run)
                run.news.set()

    async def sleep(self) -> None:
        """Take no requests; there is no memory to free."""
        self._check_alive()
        self._asleep = True
        runs = list(self._running)
        await self.abort([run.request for run in runs])
        for run in runs:
            await run.ended.wait()

    async def wake(self) -> None:
        """Take requests again."""
        self._asleep = False
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        for run in self._waiting:
            run.news.set()

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDead("the engine is closed")

    async def close(self) -> None:
        """Stop; running requests end with `EngineDead`."""
        self._closed = True
        for run in [*self._running, *self._waiting]:
            run.news.set()

    def _plan(self, request: Request) -> tuple[int, FinishReason]:
        """Number of new tokens and how they end."""
        limit = token_limit(request, self._settings.context_tokens)
        made = 0 if request.prefix_ids is None else len(request.prefix_ids)
        settings = self._settings
        drawn = (
            length_of(request.prompt_ids, settings.lengths, settings.seed)
            if settings.by_prompt
            else self._lengths[next(self._arrivals) % len(self._lengths)]
        )
        length = max(1, drawn - made)
        return (length, FinishReason.STOP) if length <= limit else (limit, FinishReason.LENGTH)

    def _complete(self, run: _Run, tokens: int, finish_reason: FinishReason) -> Completion:
        ids = np.full(tokens, FILLER_ID, dtype=np.int32)
        if finish_reason is FinishReason.STOP:
            ids[-1] = EOS_ID
        logprobs = np.full(tokens, self._settings.logprob, dtype=np.float32)
        return Completion(ids, logprobs, version_spans(run.swaps, tokens), finish_reason)

    def _made(self, run: _Run) -> int:
        """Tokens that the time so far gives; the last one is still to come."""
        return min(int((self._now_s() - run.started_s) * self._settings.tokens_per_s), run.tokens - 1)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def length_of(prompt_ids: Int32Array, lengths: Sequence[int], seed: int) -> int:
    """The one of `lengths` that the prompt int32 [P] draws; the same wherever and whenever it is asked."""
    drawn = blake2b(prompt_ids.astype("<i4").tobytes(), digest_size=8, key=str(seed).encode()).digest()
    return lengths[int.from_bytes(drawn) % len(lengths)]


def _holds(run: _Run) -> bool:
    """Whether a swap of any mode waits for it."""
    return run.request.must_finish and not run.aborted
