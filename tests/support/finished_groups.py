"""Finished groups as a user inserts them."""

from collections.abc import Sequence

import numpy as np

from rollq.buffer.values.rollouts import (
    FinishedGroup,
    FinishReason,
    Prompt,
    Sample,
    SampleStatus,
    Segment,
    absent_logprobs,
    unversioned,
)


def finished_sample(
    reward: float = 1.0, *, response: Sequence[int] = (3, 4, 5), logprobs: Sequence[float] | None = None, text: str = ""
) -> Sample:
    """A sample that no weights of the run have made; without logprobs unless some are given."""
    known = absent_logprobs(len(response)) if logprobs is None else np.array(logprobs, np.float32)
    segment = Segment(np.array([1, 2], np.int32), np.array(response, np.int32), known, unversioned(len(response)))
    return Sample((segment,), SampleStatus.COMPLETED, FinishReason.STOP, reward, text=text)


def finished_group(number: int, size: int = 2, *, logprobs: Sequence[float] | None = None) -> FinishedGroup:
    """A group whose samples have the rewards 0, 1, ..."""
    return FinishedGroup(
        Prompt(f"prompt {number}"), tuple(finished_sample(float(i), logprobs=logprobs) for i in range(size))
    )


def finished_groups(count: int, size: int = 2, *, first: int = 0) -> list[FinishedGroup]:
    """`count` groups without logprobs."""
    return [finished_group(number, size) for number in range(first, first + count)]
