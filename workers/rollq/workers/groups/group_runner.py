"""Runs one group through a worker: makes its samples, filters the group, and puts one result.

Invariant: every lease ends in exactly one way: its result is put, it is handed back, its group is dropped because the
prompt is too long, or the worker no longer holds it. A stopped group keeps its finished samples and, with partial
rollout, the tokens of unfinished samples. A group without either is handed back. The attempt then counts as a try if
the engine failed, the time was up or an unexpected error was raised, but not if the attempt was stopped for another
reason. A loan ends when its samples are returned, finished or not.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import RunMismatch, StoreLost
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import GroupResult, Lease, Sample, SampleStatus
from rollq.workers.agents.loops import PromptTooLong
from rollq.workers.batcher import Batcher
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import EngineDead
from rollq.workers.groups.cut_off import without_the_rest
from rollq.workers.groups.filters import FilterError, completed, have_ended, is_enough, is_finished, keep
from rollq.workers.groups.group_judging import GroupJudging, kept_until_judged, too_few
from rollq.workers.groups.leases import HeldLease, StopReason
from rollq.workers.groups.recipes import Recipe
from rollq.workers.groups.sample_maker import SampleMaker, storable
from rollq.workers.groups.timeouts import AttemptTimeouts
from rollq.workers.judging.group_judge import GroupNotJudged

log = logging.getLogger(__name__)

PUT_GATHER_S = 0.002
PUT_LIMIT = 256
LAST_FILTERS_S = 3.0
"""How many seconds the group judge and the filters may take on a group that ends with its batch. The coordinator waits
a little longer."""
ABORT_S = 1.0
"""How many seconds a stopped group may take to return its tokens."""
FINISHED = (PutOutcome.COMPLETED, PutOutcome.GATHERED, PutOutcome.FILTERED)


@dataclass(slots=True)
class Totals:
    """Counts since the worker's start. `restarted` counts results that their batch rejected, and that are generated
    again.
    """

    groups: int = 0
    samples: int = 0
    failed_samples: int = 0
    restarted: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class HandBack:
    """A lease to hand back. `error` is set if the try counts as spent."""

    lease: Lease
    error: str | None = None


class GroupRunner:
    """Turns leases into results."""

    def __init__(
        self,
        calls: BufferCalls,
        host: EngineHost,
        recipes: Mapping[str, Recipe],
        making: SampleMaker,
        judging: GroupJudging,
        timeouts: AttemptTimeouts,
    ) -> None:
        self.totals = Totals()
        self._buffer = calls.buffer
        self._host = host
        self._recipes = recipes
        self._making = making
        self._judging = judging
        self._timeouts = timeouts
        self._threads = calls.threads
        self._too_long = LogOnce(log)
        self._puts = Batcher(self._buffer.put, calls.threads, gather_s=PUT_GATHER_S, limit=PUT_LIMIT, parallel=2)
        self._ended_loans = Batcher(self._end_loans, calls.threads, gather_s=PUT_GATHER_S, limit=PUT_LIMIT)
        self._hand_backs = Batcher(self._hand_back_many, calls.threads, gather_s=PUT_GATHER_S, limit=PUT_LIMIT)

    async def run(self, held: HeldLease) -> None:
        """Run one group from its lease to its end. Cancelling stops the group; `held.cut` may hold the reason."""
        held.started = True
        try:
            await (self._make_borrowed(held) if held.lease.borrowed else self._attempt(held))
        except (StoreLost, RunMismatch):
            raise
        except Exception as error:  # a bug here must not look like a worker's death
            log.exception("group %d of task %r went wrong", held.lease.group_id, held.lease.task)
            if held.lease.borrowed:
                await self._give_back(held)
            else:
                await self._hand_back(held, f"{type(error).__name__}: {error}")
        finally:
            if held.trace:
                held.trace.end(held.cut or "")

    async def _attempt(self, held: HeldLease) -> None:
        samples = held.made = list(held.lease.samples)
        recipe = self._recipes[held.lease.task]
        started_s = monotonic()
        making = asyncio.create_task(self._making.make(recipe, held, samples))
        try:
            # Shielded: when this task is cancelled, `_stop` first lets running requests return their tokens so far.
            await asyncio.shield(making)
            result = await self._result(held.lease, samples, started_s)
        except EngineDead as error:
            await self._break_off(held, samples, started_s, f"the engine died: {error}")
        except PromptTooLong as error:
            await self._drop(held, error)
        except asyncio.CancelledError:
            await self._stop(held, making)
            if held.cut is StopReason.TIMEOUT:
                seconds = monotonic() - started_s
                await self._break_off(
                    held, samples, started_s, f"attempt {held.lease.attempt} was cut off after {seconds:.1f} s"
                )
            elif held.cut is not StopReason.GONE:
                await self._break_off(held, samples, started_s, None)
        else:
            await self._put(held, result)

    async def _make_borrowed(self, held: HeldLease) -> None:
        """Make samples of another worker's group, put them into the buffer one by one, and end the loan."""
        making = asyncio.create_task(self._making.make(self._recipes[held.lease.task], held, list(held.lease.samples)))
        try:
            await asyncio.shield(making)
        except (EngineDead, PromptTooLong) as error:
            log.info("samples of group %d of task %r: %s", held.lease.group_id, held.lease.task, error)
        except asyncio.CancelledError:
            await self._stop(held, making)
        await self._give_back(held)

    async def _give_back(self, held: HeldLease) -> None:
        held.finished = True
        if held.cut is not StopReason.GONE:
            await self._ended_loans.submit(held.lease)

    async def _stop(self, held: HeldLease, making: "asyncio.Task[None]") -> None:
        """Stop generating a group. Its samples keep the tokens that arrive in time, unless the lease is gone."""
        held.finished = True
        self._making.let_go(held)
        if held.cut is not StopReason.GONE:
            with suppress(EngineDead):
                await self._host.abort(held.requests)
            await asyncio.wait([making], timeout=ABORT_S)
        making.cancel()
        await asyncio.wait([making])
        error = None if making.cancelled() else making.exception()
        if error is not None and not isinstance(error, EngineDead):  # the engine is closed before its groups
            log.info("group %d of task %r, while it was stopped: %s", held.lease.group_id, held.lease.task, error)

    async def hand_back(self, leases: Sequence[Lease]) -> None:
        """Hand back leases whose groups were not started; their tries do not count."""
        await asyncio.gather(*(self._hand_backs.submit(HandBack(lease)) for lease in leases))

    # results

    async def _result(self, lease: Lease, samples: Sequence[Sample], started_s: float) -> GroupResult:
        """Make the result for these samples. A finished group is judged as a whole and filtered, unless it is an
        evaluation's."""
        recipe = self._recipes[lease.task]
        result = GroupResult(lease, tuple(samples), generate_s=monotonic() - started_s)
        if lease.evaluation:
            return result
        try:
            if recipe.group_judge is not None:
                result = await self._judged(recipe, result)
            if not recipe.filters or not is_finished(result.samples, recipe.min_valid_samples):
                return result
            return replace(result, filtered=not await keep(recipe.filters, lease.prompt, result.samples))
        except (FilterError, GroupNotJudged) as error:
            log.error("group %d of task %r: %s", lease.group_id, lease.task, error, exc_info=error.__cause__)
            failed = [_failed(sample, str(error), error.kind) for sample in samples]
            return replace(result, samples=tuple(failed), error=str(error))

    async def _judged(self, recipe: Recipe, result: GroupResult) -> GroupResult:
        """The result, with the group judge's rewards if all samples have ended and enough have completed. Raises
        `GroupNotJudged`."""
        samples = result.samples
        if not have_ended(samples):
            return replace(result, samples=tuple(kept_until_judged(samples)))
        if not is_enough(samples, recipe.min_valid_samples):
            error = next((sample.error for sample in samples if sample.error), None)
            return replace(result, samples=tuple(too_few(samples)), error=error)
        return replace(result, samples=tuple(await self._judging.judge(recipe, result.lease, samples)))

    def _worth_keeping(self, lease: Lease, samples: Sequence[Sample]) -> bool:
        """Whether a stopped attempt has results that the next attempt can keep."""
        if lease.evaluation:  # an evaluation starts again as a whole
            return False
        return any(
            (new.status is SampleStatus.COMPLETED and new is not old)
            or (new.status is SampleStatus.ABORTED and new.response_tokens > old.response_tokens)
            for new, old in zip(samples, lease.samples, strict=True)
        )

    # ends

    async def _put(self, held: HeldLease, result: GroupResult) -> None:
        held.finished = True
        lease, samples = held.lease, result.samples
        started_s = monotonic()
        outcome = await self._puts.submit(result)
        if held.trace:
            held.trace.put(started_s, samples, outcome)
        if outcome is PutOutcome.REFUSED:
            self.totals.refused += 1
            log.warning("group %d of task %r: its result came too late", lease.group_id, lease.task)
            return
        if outcome is PutOutcome.RESTARTED:
            self.totals.restarted += 1
            return
        if held.cut is StopReason.BATCH_OVER:  # left-out samples have not failed, and took less time
            samples = tuple(completed(samples))
        elif outcome in FINISHED:
            self._timeouts.note(lease, result.generate_s)
            self._warn_of_missing_scores(lease, samples)
        self.totals.groups += 1
        self.totals.samples += len(samples)
        self.totals.failed_samples += sum(sample.status is SampleStatus.FAILED for sample in samples)

    def _warn_of_missing_scores(self, lease: Lease, samples: Sequence[Sample]) -> None:
        missing = sum(sample.reward is None for sample in samples)
        if missing:
            log.warning(
                "group %d of task %r: %d of %d samples have no reward; sums leave them out",
                lease.group_id, lease.task, missing, len(samples),
            )  # fmt: skip

    async def _hand_back(self, held: HeldLease, error: str | None) -> None:
        held.finished = True
        if error is not None:
            log.warning("group %d of task %r handed back: %s", held.lease.group_id, held.lease.task, error)
        await self._hand_backs.submit(HandBack(held.lease, error))
        if held.trace:
            held.trace.handed_back(error or "")

    async def _drop(self, held: HeldLease, error: PromptTooLong) -> None:
        held.finished = True
        self._too_long.warning(
            held.lease.task,
            "group %d of task %r: %s; it is dropped, and its row is left out from now on; more are counted, not logged",
            held.lease.group_id, held.lease.task, error,
        )  # fmt: skip
        drop = partial(self._buffer.drop_too_long, held.lease, error.tokens, str(error))
        await asyncio.get_running_loop().run_in_executor(self._threads, drop)
        if held.trace:
            held.trace.dropped(str(error))

    async def _break_off(self, held: HeldLease, samples: Sequence[Sample], started_s: float, error: str | None) -> None:
        """Put partial results if there are any. Otherwise, hand the group back; the try then counts if there is an
        `error`."""
        lease, samples = held.lease, _storable(held.lease, await self._with_away(held, samples))
        has_enough = is_enough(samples, self._recipes[lease.task].min_valid_samples)
        ends = held.cut is StopReason.BATCH_OVER and has_enough
        if ends or self._worth_keeping(lease, samples):
            salvaged = _with_kept(held, samples)
            try:
                async with asyncio.timeout(LAST_FILTERS_S if ends else ABORT_S):
                    result = await self._result(lease, without_the_rest(salvaged) if ends else salvaged, started_s)
            except TimeoutError:
                log.info("group %d of task %r: no time for its filters and group judge", lease.group_id, lease.task)
                if error is None and self._worth_keeping(lease, salvaged):
                    kept = tuple(kept_until_judged(salvaged))
                    await self._put(held, GroupResult(lease, kept, generate_s=monotonic() - started_s))
                    return
            else:
                await self._put(held, result)
                return
        await self._hand_back(held, error)

    async def _with_away(self, held: HeldLease, samples: Sequence[Sample]) -> Sequence[Sample]:
        """A stopped attempt's samples. Lent samples include the tokens that other workers have made: `put` replaces the
        buffer's copy."""
        if not held.away:
            return samples
        salvaged = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._buffer.kept, held.lease, tuple(held.away)
        )
        return [salvaged.get(index, sample) for index, sample in enumerate(samples)]

    def _end_loans(self, loans: Sequence[Lease]) -> Sequence[None]:
        self._buffer.end_loans(loans)
        return [None] * len(loans)

    def _hand_back_many(self, items: Sequence[HandBack]) -> Sequence[None]:
        by_error: dict[str | None, list[Lease]] = {}
        for item in items:
            by_error.setdefault(item.error, []).append(item.lease)
        for error, leases in by_error.items():
            self._buffer.hand_back(leases, counted=error is not None, error=error)
        return [None] * len(items)


def _storable(lease: Lease, samples: Sequence[Sample]) -> list[Sample]:
    """A stopped attempt's samples in a form that the buffer accepts: samples that were given up, or were being judged,
    have not been checked yet."""
    return [
        storable(new) if new.status is SampleStatus.ABORTED and new is not old else new
        for new, old in zip(samples, lease.samples, strict=True)
    ]


def _failed(sample: Sample, error: str, kind: FailureKind) -> Sample:
    """A sample of a failed group. A sample that had already failed keeps its error and failure kind."""
    if sample.status is not SampleStatus.FAILED:
        sample = replace(sample, status=SampleStatus.FAILED, error=sample.error or error, failure=kind)
    return replace(sample, reward=None, reward_parts={})


def _with_kept(held: HeldLease, samples: Sequence[Sample]) -> Sequence[Sample]:
    """A stopped attempt's samples. If a sample's tokens were not returned in time, its last salvaged state is used:
    `put` replaces the buffer's copy."""
    return [
        storable(held.kept[index]) if new is old and index in held.kept else new
        for index, (new, old) in enumerate(zip(samples, held.lease.samples, strict=True))
    ]
