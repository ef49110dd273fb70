"""Rewards groups that are judged as a whole, when all samples have ended.

Invariant: only a group that is put as finished has rewards from its group judge. Until a group is judged, the buffer
keeps the group's complete samples as unfinished samples that wait for it. The next attempt neither makes nor judges
them again. If siblings are made again, samples that come back with rewards from their group judge get their earlier
rewards back.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, Final

import numpy as np

from rollq.buffer.common.mappings import without
from rollq.buffer.rewards.credit import JUDGED_REWARD
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import Lease, Sample, SampleStatus
from rollq.buffer.wire.group_fields import sample_problem
from rollq.workers.groups.filters import completed, have_ended
from rollq.workers.groups.recipes import Recipe
from rollq.workers.groups.sample_judging import SampleJudging, finished
from rollq.workers.judging.group_judge import GroupJudge, GroupNotJudged
from rollq.workers.judging.rewards import Verdict
from rollq.workers.judging.token_rewards import (
    add_on_last_token,
    token_rewards_of,
    with_token_rewards,
    without_token_rewards,
)

JUDGED_ALONE: Final = "judged_alone"
"""The key in `Sample.extra` for a sample's reward, with its parts, from before its group was judged."""
AWAITS_GROUP: Final = "awaits_group"
"""The key in `Sample.extra` that marks a complete sample that waits for its group."""
TOO_FEW: Final = "not judged: too few samples of its group completed"


class GroupJudging:
    """Gets verdicts from group judges."""

    def __init__(self, judging: SampleJudging) -> None:
        self._judging = judging

    async def judge(self, recipe: Recipe, lease: Lease, samples: Sequence[Sample]) -> list[Sample]:
        """An ended group's samples with rewards from its group judge; failed samples are unchanged. Raises
        `GroupNotJudged`."""
        judge = recipe.group_judge
        assert judge is not None
        started_s = monotonic()
        alone = list(map(before, samples))
        given = completed(alone)
        try:
            verdicts = await judge.verdicts(lease.prompt, given)
            seconds = monotonic() - started_s
            rewarded = [
                finished(after(sample, verdict, judge, seconds), recipe.settings)
                for sample, verdict in zip(given, verdicts, strict=True)
            ]
            judged = _with_completed(alone, rewarded)
            _check(judge, judged)
        except GroupNotJudged as error:
            self._judging.note_group(len(given), [str(error)] * len(given), monotonic() - started_s)
            raise
        self._judging.note_group(len(given), [sample.error for sample in rewarded if sample.error], seconds)
        return judged


def _with_completed(samples: Sequence[Sample], completed: Iterable[Sample]) -> list[Sample]:
    """The samples, with the completed ones replaced by `completed`, in order."""
    others = iter(completed)
    return [next(others) if sample.status is SampleStatus.COMPLETED else sample for sample in samples]


def after(sample: Sample, verdict: Verdict, judge: GroupJudge, seconds: float) -> Sample:
    """A sample with its reward from the group judge, or a failed sample. If the sample has token rewards and the
    verdict has only a reward for the whole sample, the last token gets the difference."""
    if verdict.reward is None:
        failed = replace(sample, status=SampleStatus.FAILED, error=verdict.error, failure=verdict.failure)
        return replace(failed, reward=None, reward_parts={})
    tokens = token_rewards_of(sample)
    judges = filter(None, (sample.extra.get("judge"), judge.name.rpartition(".")[2]))
    facts = {
        "judge": ", ".join(map(str, judges)),
        "judge_s": round(sample.extra.get("judge_s", 0.0) + seconds, 3),
        JUDGED_ALONE: {
            "reward": sample.reward,
            "parts": dict(sample.reward_parts),
            "facts": {name: sample.extra[name] for name in ("judge", "judge_s") if name in sample.extra},
            "notes": sorted(verdict.notes.keys() - sample.extra.keys()),
            **({} if tokens is None else {"tokens": tokens.tolist()}),
        },
    }
    judged = replace(
        sample,
        reward=verdict.reward,
        reward_parts={**verdict.parts, **verdict.facts},
        extra={**verdict.notes, **sample.extra, **facts},
    )
    if verdict.token_rewards is not None:
        return with_token_rewards(judged, verdict.token_rewards)
    return add_on_last_token(judged, verdict.reward - (sample.reward or 0.0))


def before(sample: Sample) -> Sample:
    """A sample without its group's verdict, if any."""
    record: Mapping[str, Any] | None = sample.extra.get(JUDGED_ALONE)
    if record is None:
        return sample
    added = {JUDGED_ALONE, JUDGED_REWARD, "judge", "judge_s", *record["notes"]}
    extra = {**without(sample.extra, added), **record["facts"]}
    restored = replace(sample, reward=record["reward"], reward_parts=record["parts"], extra=extra)
    if "tokens" in record:
        return with_token_rewards(restored, np.array(record["tokens"], np.float32))
    return without_token_rewards(restored)


def waiting(sample: Sample) -> Sample:
    """A completed sample in the form that the buffer keeps until the group is judged: all its content, marked as
    unfinished."""
    if sample.status is not SampleStatus.COMPLETED:
        return sample
    return replace(sample, status=SampleStatus.ABORTED, extra={**sample.extra, AWAITS_GROUP: True})


def kept_until_judged(samples: Sequence[Sample]) -> list[Sample]:
    """An unjudged group's samples in the form that the buffer keeps: some are marked as unfinished, so the group is
    too."""
    is_whole = have_ended(samples)
    return [waiting(sample) if is_whole or sample.reward is None else sample for sample in samples]


def too_few(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of a group that fails unjudged. Samples without a reward fail too, with the group's most frequent
    failure kind."""
    kinds = Counter(sample.failure for sample in samples if sample.failure)
    kind = kinds.most_common(1)[0][0] if kinds else FailureKind.GRADER
    return [
        replace(sample, status=SampleStatus.FAILED, error=TOO_FEW, failure=kind)
        if sample.status is SampleStatus.COMPLETED and sample.reward is None
        else sample
        for sample in samples
    ]


def _check(judge: GroupJudge, samples: Sequence[Sample]) -> None:
    """Raise `GroupNotJudged` if the buffer would refuse one of the samples."""
    for problem in filter(None, map(sample_problem, samples)):
        raise GroupNotJudged(f"group judge {judge.name!r}: the buffer refuses a sample: {problem}")
