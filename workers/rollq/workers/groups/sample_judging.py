"""Asks the judge to reward generated samples, and stores the rewards in the samples."""

from collections.abc import Iterable
from dataclasses import replace
from time import monotonic

from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import Lease, Sample, SampleStatus
from rollq.workers.groups.leases import HeldLease
from rollq.workers.groups.overlong import OVERLONG, mask_truncated, punish
from rollq.workers.groups.recipes import Recipe
from rollq.workers.groups.task_settings import WorkerTask
from rollq.workers.http.pools import score
from rollq.workers.judging.options import NONE
from rollq.workers.judging.rewards import JUDGE_ERROR, Verdict, failed_as_wrong
from rollq.workers.judging.token_rewards import check_token_rewards, with_token_rewards
from rollq.workers.user_code.real_numbers import finite

OWN_REWARD = "session"
"""Replaces the judge's name if the agent loop set the reward."""


class SampleJudging:
    """Judges samples. `judged` counts samples, `unrewarded` counts samples without a reward, and `error` is the last
    error. `judge_s` is the total judging time in seconds."""

    def __init__(self) -> None:
        self.judged = self.unrewarded = 0
        self.judge_s = 0.0
        self.error = ""

    async def judge(self, recipe: Recipe, held: HeldLease, index: int, made: Sample) -> Sample:
        """A completed sample with its reward, or a failed sample. Either names its judge and the judging duration,
        except after the judge `none`."""
        started_s, rewarded = monotonic(), made.reward is not None
        made = await self._judge(recipe, held.lease, made)
        if recipe.judge.name == NONE and not rewarded and made.error is None:
            return made
        judge_s = monotonic() - started_s
        if held.trace:
            held.trace.judged(index, started_s, made)
        self.note_group(1, filter(None, [made.error or made.extra.get(JUDGE_ERROR)]), judge_s)
        judge = OWN_REWARD if rewarded else recipe.judge.name_for(held.lease.prompt)
        return replace(made, extra={**made.extra, "judge": judge, "judge_s": round(judge_s, 3)})

    def note_group(self, samples: int, errors: Iterable[str], seconds: float) -> None:
        """Note that this many samples were judged together, with the errors of samples without a reward."""
        self.judged += samples
        self.judge_s += seconds
        for error in errors:
            self.unrewarded += 1
            self.error = error

    @staticmethod
    async def _judge(recipe: Recipe, lease: Lease, made: Sample) -> Sample:
        """A completed sample with its reward, or a failed sample. A sample that already has a reward keeps it. With the
        judge `none`, other samples stay without a reward."""
        task = recipe.settings
        verdict = own_verdict(made) if made.reward is not None else await recipe.judge.judge(lease.prompt, made)
        if verdict.raised and task.on_judge_error == "zero":
            verdict = failed_as_wrong(verdict)
        if verdict.error is not None:
            return _failed(made, verdict.error, verdict.failure)
        counts_errors = {JUDGE_ERROR: 0.0} if task.on_judge_error == "zero" and made.reward is None else {}
        judged = replace(
            made,
            reward=verdict.reward,
            reward_parts={**counts_errors, **verdict.parts, **verdict.facts},
            extra={**verdict.notes, **made.extra},
        )
        return judged if lease.evaluation else await _trainable(recipe, made, judged, verdict)


async def _trainable(recipe: Recipe, made: Sample, judged: Sample, verdict: Verdict) -> Sample:
    """The judged sample with its token rewards and scores, or a failed sample."""
    if verdict.token_rewards is not None:
        judged = with_token_rewards(judged, verdict.token_rewards)
    try:
        check_token_rewards(judged)
    except ValueError as error:
        return _failed(made, f"agent loop: {error}", FailureKind.PROGRAM)
    try:
        judged = await score(judged, recipe.pools, recipe.settings.scorers)
    except ValueError as error:
        return _failed(made, f"scorer: {error}", FailureKind.PROVIDER)
    return judged if recipe.group_judge else finished(judged, recipe.settings)


def finished(judged: Sample, task: WorkerTask) -> Sample:
    """A judged sample after the task's treatment of overlong answers."""
    if judged.status is not SampleStatus.COMPLETED:
        return judged
    if task.overlong_buffer_tokens:
        judged = punish(judged, task.max_tokens, task.overlong_buffer_tokens, task.overlong_penalty)
    return mask_truncated(judged) if OVERLONG in task.filters else judged


def _failed(made: Sample, error: str, kind: FailureKind) -> Sample:
    """A failed sample without a reward, even if its agent loop set one."""
    return replace(made, status=SampleStatus.FAILED, reward=None, reward_parts={}, error=error, failure=kind)


def own_verdict(made: Sample) -> Verdict:
    """The verdict of a sample that its agent loop has rewarded."""
    try:
        parts = {name: finite(part) for name, part in made.reward_parts.items()}
        return Verdict(finite(made.reward), parts)
    except ValueError as error:
        return Verdict(error=f"agent loop: it {error}", failure=FailureKind.PROGRAM)
