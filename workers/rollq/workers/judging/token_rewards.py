"""Writes a sample's named array `token_rewards` from a verdict, or checks the array of an agent loop. Pure.

Invariant: all segments of a sample have the array, or none has it.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollq.buffer.rewards.credit import TOKEN_REWARDS, last_tokens
from rollq.buffer.values.rollouts import ArrayRef, Float32Array, Sample


def on_last_token(sample: Sample, reward: float) -> Float32Array:
    """The whole sample's reward as token rewards float32 [R]: the model's last token gets all of the reward."""
    rewards = np.zeros(sample.response_tokens, np.float32)
    rewards[last_tokens(sample.segments, "tokens")[-1:]] = reward
    return rewards


def with_token_rewards(sample: Sample, rewards: Float32Array) -> Sample:
    """The sample with these token rewards float32 [R] for all segments' response tokens, in place of earlier ones."""
    ends = np.cumsum([len(segment.response_ids) for segment in sample.segments])[:-1]
    parts = np.split(rewards, ends)
    segments = [
        replace(segment, arrays={**segment.arrays, TOKEN_REWARDS: part})
        for segment, part in zip(sample.segments, parts, strict=True)
    ]
    return replace(sample, segments=tuple(segments))


def token_rewards_of(sample: Sample) -> Float32Array | None:
    """The rewards float32 [R] of all segments' response tokens; None if there are none in memory."""
    rewards = [segment.arrays.get(TOKEN_REWARDS) for segment in sample.segments]
    arrays = [array for array in rewards if isinstance(array, np.ndarray)]
    if not arrays or len(arrays) < len(rewards):
        return None
    own = [array[-len(segment.response_ids) :] for array, segment in zip(arrays, sample.segments, strict=True)]
    return np.asarray(np.concatenate(own), np.float32)


def add_on_last_token(sample: Sample, reward: float) -> Sample:
    """The sample, with `reward` added to its last token's reward if token rewards are in memory."""
    rewards = token_rewards_of(sample)
    return sample if rewards is None else with_token_rewards(sample, rewards + on_last_token(sample, reward))


def without_token_rewards(sample: Sample) -> Sample:
    """The sample without token rewards."""
    segments = [
        replace(segment, arrays={name: array for name, array in segment.arrays.items() if name != TOKEN_REWARDS})
        for segment in sample.segments
    ]
    return replace(sample, segments=tuple(segments))


def check_token_rewards(sample: Sample) -> None:
    """Raise `ValueError` if only some segments have the array, or an array is not float32 [R] of finite numbers.

    R is the number of tokens in the segment's response. An array stored in a file is checked when it is loaded.
    """
    rewards = [segment.arrays.get(TOKEN_REWARDS) for segment in sample.segments]
    if all(array is None for array in rewards):
        return
    for segment, array in zip(sample.segments, rewards, strict=True):
        if array is None:
            raise ValueError(f"array {TOKEN_REWARDS!r} is missing in a segment; all or none have it")
        if not isinstance(array, ArrayRef):
            _check_array(array, segment.response_ids.shape)


def _check_array(array: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    if array.dtype != np.float32 or array.shape != shape:
        raise ValueError(
            f"array {TOKEN_REWARDS!r} is {array.dtype} {list(array.shape)}; expected float32 "
            f"{list(shape)}, one for each response token"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"array {TOKEN_REWARDS!r} has numbers that are not finite")
