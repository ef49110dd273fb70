"""Overlong answers: a soft penalty, or a mask that excludes them from the loss. Pure."""

from dataclasses import replace

import numpy as np

from rollq.buffer.rewards.credit import JUDGED_REWARD
from rollq.buffer.values.rollouts import FinishReason, Sample
from rollq.workers.judging.token_rewards import add_on_last_token

PART = "overlong"
"""The penalty's name among a reward's parts."""
OVERLONG = "overlong"
"""The filter that excludes truncated samples from the loss instead of dropping their group."""


def length_penalty(tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """0 up to `max_tokens - buffer_tokens`, then linear down to -1 at `max_tokens`, and -1 beyond.

    The soft overlong punishment of DAPO (arXiv:2503.14476, equation 13), L_max = max_tokens, L_cache = buffer_tokens.

    >>> [length_penalty(tokens, 100, 20) for tokens in (80, 90, 100, 101)]
    [0.0, -0.5, -1.0, -1.0]
    """
    over = tokens - (max_tokens - buffer_tokens)
    if over <= 0:
        return 0.0
    return -1.0 if over >= buffer_tokens else -over / buffer_tokens


def punish(sample: Sample, max_tokens: int, buffer_tokens: int, factor: float) -> Sample:
    """The sample with `factor` times its length penalty, added as a part of the reward and to the last token's reward.
    The sample keeps the judge's reward for filters and statistics."""
    if sample.reward is None:
        return sample
    penalty = factor * length_penalty(sample.response_tokens, max_tokens, buffer_tokens)
    parts = dict(sample.reward_parts or {"judge": sample.reward})
    parts[PART] = parts.get(PART, 0.0) + penalty
    punished = add_on_last_token(sample, penalty) if penalty else sample
    if penalty:
        punished = replace(punished, extra={**sample.extra, JUDGED_REWARD: sample.reward})
    return replace(punished, reward=sample.reward + penalty, reward_parts=parts)


def mask_truncated(sample: Sample) -> Sample:
    """The sample, with all tokens outside the loss if its length limit ended it (DAPO's overlong filtering)."""
    if sample.finish_reason is not FinishReason.LENGTH:
        return sample
    segments = tuple(
        replace(segment, loss_mask=np.zeros(len(segment.response_ids), np.bool_)) for segment in sample.segments
    )
    return replace(sample, segments=segments)
