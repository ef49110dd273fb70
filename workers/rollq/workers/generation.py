"""The way of one group through a worker: its samples are made and judged, at the same time, and put as one result.

Invariant: every lease ends in exactly one of three ways: its result is put, it is handed back, or it is dropped because
it was no longer the worker's. What goes wrong with a sample (its loop, its judge) fails that sample alone; what goes
wrong with the engine or with time hands the group back, counted; being stopped hands it back uncounted.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from rollq.buffer.errors import RunMismatch, StoreLost
from rollq.buffer.schema import EMPTY_SAMPLE, GroupResult, Int32Array, Lease, Sample, SampleStatus
from rollq.buffer.values import PutOutcome
from rollq.workers.batcher import Batcher
from rollq.workers.calls import BufferCalls
from rollq.workers.engine import EngineDead, Tokenizer
from rollq.workers.engine_host import EngineHost
from rollq.workers.judges import Verdict
from rollq.workers.loops import Rollout, failed, prompt_tokens
from rollq.workers.recipes import Recipe
from rollq.workers.renewal import Cut, Held

log = logging.getLogger(__name__)

PUT_GATHER_S = 0.002
PUT_LIMIT = 256
NOT_JUDGED = Verdict()


@dataclass(slots=True)
class Totals:
    """What a worker has done since it started. `tokens` counts new response tokens."""

    groups: int = 0
    samples: int = 0
    failed_samples: int = 0
    tokens: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class HandBack:
    """A lease to hand back. `error` is set when the try counts as spent."""

    lease: Lease
    error: str | None = None


class Generation:
    """Turns leases into results."""

    def __init__(
        self,
        calls: BufferCalls,
        host: EngineHost,
        recipes: Mapping[str, Recipe],
        tokenizer: Tokenizer,
        *,
        worker: str,
    ) -> None:
        self.totals = Totals()
        self._buffer = calls.buffer
        self._host = host
        self._recipes = recipes
        self._tokenizer = tokenizer
        self._extra = {"worker": worker}
        self._puts = Batcher(self._buffer.put, calls.threads, gather_s=PUT_GATHER_S, limit=PUT_LIMIT, parallel=2)
        self._hand_backs = Batcher(self._hand_back_many, calls.threads, gather_s=PUT_GATHER_S, limit=PUT_LIMIT)

    async def run(self, held: Held) -> None:
        """Take one group from its lease to its end. Cancelling is stopping it; `held.cut` may say why."""
        held.begun = True
        try:
            await self._attempt(held)
        except (StoreLost, RunMismatch):
            raise
        except Exception as error:  # a mistake in here must not pass for the death of a worker
            log.exception("group %d of task %r went wrong", held.lease.group_id, held.lease.task)
            await self._hand_back(held, f"{type(error).__name__}: {error}")

    async def _attempt(self, held: Held) -> None:
        samples = list(held.lease.samples)
        started_s = monotonic()
        try:
            await self._make_samples(held.lease, samples)
        except EngineDead as error:
            await self._hand_back(held, f"the engine died: {error}")
        except asyncio.CancelledError:
            await self._break_off(held, samples, started_s)
        else:
            await self._put(held, samples, started_s)

    async def hand_back(self, leases: Sequence[Lease]) -> None:
        """Give back leases that were not begun; their tries do not count."""
        await asyncio.gather(*(self._hand_backs.submit(HandBack(lease)) for lease in leases))

    # samples

    async def _make_samples(self, lease: Lease, samples: list[Sample]) -> None:
        """Make what is missing, each sample into its place of `samples`; completed and failed ones stay."""
        recipe = self._recipes[lease.task]
        missing = [i for i, s in enumerate(samples) if s.status in (SampleStatus.PENDING, SampleStatus.ABORTED)]
        if not missing:
            return
        try:
            prompt_ids = prompt_tokens(lease.prompt, self._tokenizer)
        except Exception as error:
            log.exception("the prompt of group %d of task %r has no tokens", lease.group_id, lease.task)
            for index in missing:
                samples[index] = failed(f"prompt: {type(error).__name__}: {error}")
            return
        await all_of([self._make_sample(recipe, lease, prompt_ids, samples, index) for index in missing])

    async def _make_sample(
        self, recipe: Recipe, lease: Lease, prompt_ids: Int32Array, samples: list[Sample], index: int
    ) -> None:
        resumes = recipe.loop.resumable and recipe.settings.partial_rollout
        previous = samples[index] if resumes else EMPTY_SAMPLE
        rollout = Rollout(
            prompt=lease.prompt,
            prompt_ids=prompt_ids,
            previous=previous,
            sampling=recipe.sampling(lease, index),
            max_prompt_tokens=recipe.settings.max_prompt_tokens,
            priority=lease.step,
            tokenizer=self._tokenizer,
            generate=self._host.generate,
        )
        try:
            made = await recipe.loop.run(rollout)
        except EngineDead:
            raise
        except Exception as error:
            log.exception("sample %d of group %d of task %r failed", index, lease.group_id, lease.task)
            made = failed(f"agent loop: {type(error).__name__}: {error}")
        self.totals.tokens += made.response_tokens - previous.response_tokens
        if made.status is SampleStatus.ABORTED and not resumes:
            samples[index] = EMPTY_SAMPLE
            return
        verdict = NOT_JUDGED
        if made.status is SampleStatus.COMPLETED:
            verdict = await recipe.judge.judge(lease.prompt, made)
        samples[index] = replace(
            made,
            status=made.status if verdict.error is None else SampleStatus.FAILED,
            reward=verdict.reward,
            reward_parts=verdict.parts,
            error=verdict.error or made.error,
            extra={**made.extra, **self._extra},
        )

    # ends

    async def _put(self, held: Held, samples: list[Sample], started_s: float) -> None:
        held.finished = True
        result = GroupResult(held.lease, tuple(samples), generate_s=monotonic() - started_s)
        outcome = await self._puts.submit(result)
        if outcome is PutOutcome.REFUSED:
            self.totals.refused += 1
            log.warning("group %d of task %r: its result came too late", held.lease.group_id, held.lease.task)
            return
        self.totals.groups += 1
        self.totals.samples += len(samples)
        self.totals.failed_samples += sum(sample.status is SampleStatus.FAILED for sample in samples)

    async def _hand_back(self, held: Held, error: str | None) -> None:
        held.finished = True
        if error is not None:
            log.warning("group %d of task %r handed back: %s", held.lease.group_id, held.lease.task, error)
        await self._hand_backs.submit(HandBack(held.lease, error))

    async def _break_off(self, held: Held, samples: list[Sample], started_s: float) -> None:
        """Put what siblings have finished, so that it is not made again, else hand the group back; by the reason."""
        if held.cut is Cut.GONE:
            return
        kept = held.lease.samples
        if held.cut is Cut.TIMEOUT:
            await self._hand_back(
                held, f"attempt {held.lease.attempt} was cut off after {monotonic() - started_s:.1f} s"
            )
        elif any(
            new is not old and new.status is SampleStatus.COMPLETED for new, old in zip(samples, kept, strict=True)
        ):
            await self._put(held, samples, started_s)
        else:
            await self._hand_back(held, None)

    def _hand_back_many(self, items: Sequence[HandBack]) -> Sequence[None]:
        by_error: dict[str | None, list[Lease]] = {}
        for item in items:
            by_error.setdefault(item.error, []).append(item.lease)
        for error, leases in by_error.items():
            self._buffer.hand_back(leases, counted=error is not None, error=error)
        return [None] * len(items)


async def all_of(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Do everything at the same time. The first error, or being cancelled, ends the rest and is raised."""
    if len(work) == 1:
        await work[0]
        return
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        rest = [task for task in tasks if not task.done()]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest)
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if errors:  # before the cancellations that they led to
        raise errors[0]
    for task in tasks:
        task.result()
