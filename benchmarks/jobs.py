"""Jobs that take no computation, so that the worker itself is measured."""

import asyncio
from typing import ClassVar

import numpy as np

from rollq.buffer.values.rollouts import FinishReason, Sample, SampleStatus, Segment, VersionSpan
from rollq.workers.agents.loops import Rollout

GENERATION_S = 0.5
ANSWER = Sample(
    segments=(
        Segment(
            prompt_ids=np.zeros(1, dtype=np.int32),
            response_ids=np.ones(1, dtype=np.int32),
            logprobs=np.full(1, -1.0, dtype=np.float32),
            versions=(VersionSpan(1, 0, 1),),
        ),
    ),
    status=SampleStatus.COMPLETED,
    finish_reason=FinishReason.STOP,
    text="1",
)


class NoOp:
    """An agent loop that returns a fixed answer at once."""

    resumable: ClassVar[bool] = False

    async def run(self, rollout: Rollout) -> Sample:
        return ANSWER


class HalfASecond:
    """An agent loop that returns a fixed answer after `GENERATION_S` seconds."""

    resumable: ClassVar[bool] = False

    async def run(self, rollout: Rollout) -> Sample:
        await asyncio.sleep(GENERATION_S)
        return ANSWER


def empty_job() -> None:
    """The job that RQ's worker runs."""
