"""Hand-made groups for the consumer's tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import FinishReason, Group, Prompt, Sample, SampleStatus, Segment, VersionSpan

EPOCH = 1
VOCABULARY = 32


def make_segment(
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    version: int = 0,
    epoch: int = EPOCH,
    logprobs: Sequence[float] | None = None,
    loss_mask: Sequence[bool] | None = None,
    arrays: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Segment:
    return Segment(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        logprobs=np.array(logprobs if logprobs is not None else [-1.0] * len(response), np.float32),
        versions=(VersionSpan(epoch, version, len(response)),),
        loss_mask=None if loss_mask is None else np.array(loss_mask, np.bool_),
        arrays=arrays or {},
    )


def make_sample(*segments: Segment, reward: float | None = 1.0, temperature: float = 1.0, worker: str = "w") -> Sample:
    return Sample(
        segments=segments,
        status=SampleStatus.COMPLETED if reward is not None else SampleStatus.FAILED,
        finish_reason=FinishReason.STOP,
        reward=reward,
        failure=FailureKind.GRADER if reward is None else None,
        sampling={"temperature": temperature},
        extra={"worker": worker},
    )


def make_group(*samples: Sample, group_id: int = 0, task: str = "math", version: int = 0) -> Group:
    return Group(task, group_id, Prompt("?"), samples, oldest_version=version, arrival=group_id, tries=1)


def random_groups(seed: int, groups: int = 6, group_size: int = 4, *, version: int = 0) -> list[Group]:
    """Groups of ragged samples: some of two segments, some with tokens of the environment, some failed."""
    rng = np.random.default_rng(seed)

    def segment() -> Segment:
        prompt, response = rng.integers(1, 6), rng.integers(1, 12)
        return make_segment(
            rng.integers(1, VOCABULARY, prompt).tolist(),
            rng.integers(1, VOCABULARY, response).tolist(),
            version=version,
            logprobs=rng.normal(-3.4, 0.2, response).tolist(),
            loss_mask=(rng.random(response) < 0.9).tolist(),
        )

    def sample() -> Sample:
        reward = None if rng.random() < 0.1 else float(rng.random())
        return make_sample(*(segment() for _ in range(rng.integers(1, 3))), reward=reward, temperature=0.8)

    return [make_group(*(sample() for _ in range(group_size)), group_id=index) for index in range(groups)]
