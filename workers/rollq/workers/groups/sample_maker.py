"""Generates and judges one group's samples concurrently.

Invariant: an error in a sample's loop or judge fails only that sample. Finished samples stay, even if others fail.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from time import monotonic
from typing import Any

import numpy as np

from rollq.buffer.common.ending import cancel
from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, FinishReason, Lease, Sample, SampleStatus
from rollq.buffer.wire.group_fields import sample_problem
from rollq.workers.agents.loops import PromptTooLong, Rollout, checked, failed, failed_with
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import Completion, EngineDead, Request, Tokenizer
from rollq.workers.engines.speed import EngineSpeed, RequestClock
from rollq.workers.groups.group_judging import AWAITS_GROUP, waiting
from rollq.workers.groups.leases import HeldLease, LeaseTable, StopReason
from rollq.workers.groups.loans import Loans
from rollq.workers.groups.places import AllPlaces
from rollq.workers.groups.read_prompts import ReadPrompt, read_prompt
from rollq.workers.groups.recipes import Recipe
from rollq.workers.groups.salvage import Salvage, SampleSalvage
from rollq.workers.groups.sample_judging import SampleJudging
from rollq.workers.groups.sample_order import expected_tokens
from rollq.workers.user_code.calls import contained
from rollq.workers.user_code.errors import reason_of, shown

log = logging.getLogger(__name__)

UNFINISHED = (SampleStatus.PENDING, SampleStatus.ABORTED)
ABORTED = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), FinishReason.ABORT)


class SampleEnds(ExitStack):
    """Functions to call after a sample is judged or given up. They may remove resources that a judge needs."""

    is_empty = True

    def add(self, function: Callable[[], object]) -> None:
        """Add a function."""
        self.is_empty = False
        self.callback(function)


class SampleMaker:
    """Makes the samples of leases. `tokens` counts generated tokens. `recomputed_tokens` counts tokens that the engine
    read again because the weights changed during a request."""

    def __init__(
        self,
        host: EngineHost,
        tokenizer: Tokenizer,
        table: LeaseTable,
        places: AllPlaces,
        salvage: Salvage,
        loans: Loans,
        judging: SampleJudging,
        *,
        worker: str,
    ) -> None:
        self.tokens = self.recomputed_tokens = 0
        self.judging = judging
        self._generated = 0  # samples
        self._generate_s = 0.0  # summed over samples
        self._host = host
        self._tokenizer = tokenizer
        self._table = table
        self._places = places
        self._salvage = salvage
        self._loans = loans
        self._clock = RequestClock(monotonic)
        self._extra = {"worker": worker}
        self._failures = LogOnce(log)

    @property
    def speed(self) -> EngineSpeed:
        """The measured speed of the engine."""
        return self._clock.speed

    @property
    def mean_sample_s(self) -> float:
        """The mean time to generate a sample, in seconds; 0.0 before the first sample."""
        return self._generate_s / self._generated if self._generated else 0.0

    def let_go(self, held: HeldLease) -> None:
        """End a stopped group's waits for places and other workers."""
        self._places.of(held.lease.task).look()
        self._loans.let_go(held)

    async def give_up(self, chosen: Mapping[HeldLease, Collection[int]]) -> None:
        """Give running samples to other workers as soon as the engine has returned the samples' tokens."""
        requests: list[Request] = []
        for held, indices in chosen.items():
            held.given_up.update(indices)
            requests += [request for request, index in held.requests.items() if index in indices]
        with suppress(EngineDead):  # a dead engine has already ended them
            await self._host.abort(requests)

    def times(self) -> Mapping[str, float]:
        """Totals so far: tokens; samples generated, judged and unrewarded; and seconds of generating and judging."""
        return {
            "tokens": self.tokens,
            "generated": self._generated,
            "generate_s": self._generate_s,
            "judged": self.judging.judged,
            "judge_s": self.judging.judge_s,
            "unrewarded": self.judging.unrewarded,
        }

    async def make(self, recipe: Recipe, held: HeldLease, samples: list[Sample]) -> None:
        """Make the missing entries of `samples` in place. Completed and failed samples stay."""
        lease, missing = held.lease, _missing(held.lease, samples)
        if not missing:
            return
        try:
            prompt = await read_prompt(lease.prompt, recipe.tokenizer(self._tokenizer))
        except Exception as error:
            log.exception("the prompt of group %d of task %r has no tokens", lease.group_id, lease.task)
            for index in missing:
                samples[index] = failed(f"prompt: {reason_of(error)}", FailureKind.PROMPT)
            return
        if problem := await recipe.own_answers.problem(lease.prompt, recipe.as_sample(prompt)):
            for index in missing:
                samples[index] = failed(problem, FailureKind.GRADER)
            self.judging.note_group(len(missing), [problem] * len(missing), 0.0)
            return
        held.looping.update(missing)
        await all_of([self._make_sample(recipe, held, prompt, samples, index) for index in missing])

    async def _make_sample(
        self, recipe: Recipe, held: HeldLease, prompt: ReadPrompt, samples: list[Sample], index: int
    ) -> None:
        """Make one sample, or lend it and finish here what the other worker left unfinished."""
        while True:
            ends = SampleEnds()
            try:
                is_lent = await self._make_with(recipe, held, prompt, samples, index, ends)
            finally:
                if not ends.is_empty:
                    await asyncio.to_thread(ends.close)
            if not is_lent:
                return
            samples[index] = await self._loans.lend(held, index, samples[index])
            if samples[index].status not in UNFINISHED or held.finished:
                break
            self._places.of(held.lease.task).enter(held, 1)
        held.expected_tokens = expected_tokens(held.lease, samples)
        self._note_generated(held, index)

    def _salvage_of(self, recipe: Recipe, held: HeldLease, index: int, previous: Sample) -> SampleSalvage | None:
        """The salvage of a sample that another worker may continue; None for other samples."""
        if not (recipe.salvages(held.lease) or held.lease.borrowed):
            return None
        return self._salvage.of(held, index, previous, recorded=recipe.records)

    async def _handed_over(self, held: HeldLease, salvage: SampleSalvage, made: Sample) -> bool:
        """Hand an unfinished sample to another worker. If that fails, the sample gets back its place here."""
        places = self._places.of(held.lease.task)
        places.note_lent(held)
        if await salvage.hand_over(made):
            return True
        places.enter(held, 1)
        return False

    async def _make_with(
        self, recipe: Recipe, held: HeldLease, prompt: ReadPrompt, samples: list[Sample], index: int, ends: SampleEnds
    ) -> bool:
        """Make one sample. Returns True if another worker should make the rest."""
        if index in held.given_up:
            held.given_up.discard(index)
            self._places.of(held.lease.task).skip(held)
            return True
        previous = recipe.previous(held.lease, samples[index])
        salvage = self._salvage_of(recipe, held, index, previous)
        rollout = self._rollout(recipe, held, prompt, index, previous, salvage, ends)
        made = await self._generated_sample(recipe, held, index, rollout)
        if made is None:
            return True
        if index in held.given_up:
            held.given_up.discard(index)
            if made.status in UNFINISHED and not held.finished and salvage:
                samples[index] = made
                is_lent = await self._handed_over(held, salvage, made)
                return is_lent or await self._make_with(recipe, held, prompt, samples, index, ends)
        self._note_generated(held, index)
        if made.status is SampleStatus.ABORTED and not recipe.resumes(held.lease):
            samples[index] = EMPTY_SAMPLE
            return False
        if ends.is_empty:
            samples[index] = _until_judged(held.lease, made, samples[index])
        samples[index] = await self._judged_sample(recipe, held, prompt, index, made)
        held.expected_tokens = expected_tokens(held.lease, samples)
        await self._keep_made(recipe, held, salvage, samples[index])
        return False

    async def _generated_sample(self, recipe: Recipe, held: HeldLease, index: int, rollout: Rollout) -> Sample | None:
        """The sample of a rollout, once it has a place; None if another worker should make it."""
        async with self._places.of(held.lease.task).place(held, stays=index in held.staying) as is_here:
            if not is_here:
                return None
            if rollout.previous.awaits_judge:
                return replace(rollout.previous, status=SampleStatus.COMPLETED)
            return await self._run_loop(recipe, held, index, rollout)

    async def _judged_sample(
        self, recipe: Recipe, held: HeldLease, prompt: ReadPrompt, index: int, made: Sample
    ) -> Sample:
        """A sample in its stored form: judged if it is completed, and with facts about its generation. A sample that
        waits for its group already has both."""
        is_judged = AWAITS_GROUP in made.extra
        if made.status is SampleStatus.COMPLETED and not is_judged:
            made = await self.judging.judge(recipe, held, index, made)
        self._places.of(held.lease.task).note_judged(held)
        if is_judged:
            return replace(made, extra={name: made.extra[name] for name in made.extra.keys() - {AWAITS_GROUP}})
        return storable(replace(made, extra={**made.extra, **self._extra, **prompt.extra(), **self._weights_check()}))

    def _rollout(
        self,
        recipe: Recipe,
        held: HeldLease,
        prompt: ReadPrompt,
        index: int,
        previous: Sample,
        salvage: SampleSalvage | None,
        ends: SampleEnds,
    ) -> Rollout:
        """One sample's rollout, for its agent loop."""
        lease = held.lease
        keeps, resumes = recipe.salvages(lease), recipe.resumes(lease)
        return Rollout(
            prompt=lease.prompt,
            prompt_ids=prompt.ids,
            previous=previous,
            sampling=recipe.sampling(lease, index, made_tokens(lease, index, previous)),
            max_prompt_tokens=recipe.settings.max_prompt_tokens,
            priority=priority(lease),
            tokenizer=prompt.tokenizer,
            generate=partial(self._generate, held, prompt, index),
            session=f"{lease.task}/{lease.group_id}/{index}/{lease.nonce}",
            keep=salvage.keep if salvage and resumes and keeps else None,
            record=salvage.record if salvage and resumes else None,
            is_stopped=lambda: held.finished or index in held.given_up,
            task=task_of(lease.task),
            index=index,
            evaluation=lease.evaluation,
            at_end=ends.add,
        )

    async def _run_loop(self, recipe: Recipe, held: HeldLease, index: int, rollout: Rollout) -> Sample:
        """The agent loop's sample: a failed sample if the loop fails, and an empty sample if the group was stopped."""
        started_s = monotonic()
        try:
            made = EMPTY_SAMPLE if held.finished else checked(await contained(recipe.loop.run(rollout)))
        except (EngineDead, PromptTooLong):
            raise
        except Exception as error:  # noqa: BLE001 - an error in a user's loop fails only its sample
            self._log_failure(held.lease, index, error)
            made = failed_with(error)
        if made.status is SampleStatus.FAILED and made.failure is None:  # a loop may omit the kind
            made = replace(made, failure=FailureKind.PROGRAM)
        self._generated += 1
        self._generate_s += monotonic() - started_s
        return made

    async def _keep_made(self, recipe: Recipe, held: HeldLease, salvage: SampleSalvage | None, made: Sample) -> None:
        """Keep a finished sample in the buffer: a borrowed sample for the worker that holds the group's lease, any
        other sample until the group is finished."""
        if salvage is None:
            return
        kept = waiting(made) if made.reward is None else made
        if held.lease.borrowed:
            if not await salvage.hand_over(kept):
                self._table.stop(held, StopReason.UNKEPT)
        elif (held.looping or recipe.group_judge) and made.status is SampleStatus.COMPLETED:
            salvage.keep_whole(kept)

    def _note_generated(self, held: HeldLease, index: int) -> None:
        """Note that a sample has been generated, here or elsewhere."""
        held.looping.discard(index)
        if not held.looping:
            self._table.note_generated(held)

    def _weights_check(self) -> dict[str, Any]:
        """The last check of the engine's weights, if any."""
        check = self._host.check
        return {} if check is None else {"weights_check": asdict(check)}

    def _log_failure(self, lease: Lease, index: int, error: Exception) -> None:
        """Log an agent loop's failure, once per task and exception type."""
        self._failures.warning(
            (lease.task, type(error).__name__),
            "the agent loop of task %r failed for sample %d of group %d; samples keep the error, and more of this type "
            "are not logged",
            lease.task, index, lease.group_id, exc_info=error,
        )  # fmt: skip

    async def _generate(self, held: HeldLease, prompt: ReadPrompt, index: int, request: Request) -> Completion:
        """Generate for sample `index` of a group with this prompt. Aborts immediately if the group is being stopped.

        Raises `ImageError` for image tokens without an image.
        """
        if held.finished or index in held.given_up:
            return ABORTED
        must_finish = held.lease.must_finish or held.lease.evaluation
        report = None if request.report is None else partial(self._report, request.report)
        images = prompt.images_in(request.context.tolist()) if prompt.reserved else None
        request = replace(request, must_finish=must_finish, report=report, images=images)
        held.requests[request] = index
        started_s = monotonic()
        with self._clock.request() as got:
            try:
                completion = await self._host.generate(request)
            finally:
                del held.requests[request]
            got(len(completion.ids))
        if held.trace:
            held.trace.generated(index, started_s, request, completion)
        self.tokens += len(completion.ids)
        self.recomputed_tokens += recomputed(request, completion)
        prompt.check_response(completion.ids.tolist())
        return completion

    def _report(self, report: Callable[[Completion], None], so_far: Completion) -> None:
        """Report unfinished tokens if their weights have passed their check."""
        if self._host.trusts(so_far.versions):
            report(so_far)


def _missing(lease: Lease, samples: Sequence[Sample]) -> list[int]:
    """The indices of the unfinished samples that this lease is for."""
    return [index for index in lease.borrowed or range(len(samples)) if samples[index].status in UNFINISHED]


def storable(made: Sample) -> Sample:
    """The sample, or a failed sample with the reason if the buffer would refuse it, and with it the whole group."""
    made = made if made.error is None else replace(made, error=shown(made.error))
    problem = sample_problem(waiting(made) if made.reward is None else made)
    return made if problem is None else failed(f"the sample cannot be stored: {shown(problem)}")


def made_tokens(lease: Lease, index: int, previous: Sample) -> int:
    """The number of a sample's tokens that any worker generated earlier in this attempt; all tokens of a borrowed
    sample."""
    if lease.borrowed:
        return previous.response_tokens
    return previous.response_tokens - lease.samples[index].response_tokens


def recomputed(request: Request, completion: Completion) -> int:
    """The number of tokens that the engine recomputed after weight changes: for each later span, all earlier tokens,
    including prompt and prefix."""
    context = len(request.context)
    ends = accumulate(span.tokens for span in completion.versions[:-1])
    return sum(context + end for end in ends)


def priority(lease: Lease) -> int:
    """The priority in the engine, lowest first, by step. An evaluation comes after its step's training and before the
    next step's training."""
    return 2 * lease.step + lease.evaluation


async def all_of(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run everything concurrently. The first error or a cancellation cancels the rest and is raised.

    Unlike `asyncio.TaskGroup`, this raises the error itself, not an exception group.
    """
    if len(work) == 1:
        await work[0]
        return
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await cancel(tasks)
        for task in tasks:
            task.cancelled() or task.exception()  # retrieved, so asyncio does not log it
    for task in sorted(tasks, key=asyncio.Task.cancelled):  # errors before the cancellations that they caused
        task.result()


def _until_judged(lease: Lease, made: Sample, before: Sample) -> Sample:
    """The sample to use if its group is stopped during judging: `made` as unfinished, or `before` if `made` needs no
    judge."""
    if made.status is not SampleStatus.COMPLETED or made.reward is not None or lease.evaluation:
        return before
    return replace(made, status=SampleStatus.ABORTED)
