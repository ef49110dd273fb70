"""The advantages of a group's tokens from the named array `token_rewards`, for `Batch.with_credit`.

Invariant: samples are compared only within their group, so a sequence gets the same advantages on any rank.
"""

from collections.abc import Iterator
from itertools import chain

import numpy as np

from rollq.buffer.errors import InvalidGroup
from rollq.buffer.rewards.advantages import AdvantageSettings
from rollq.buffer.rewards.credit import TOKEN_REWARDS, StepKind, steps_of, token_advantages
from rollq.buffer.values.rollouts import BoolArray, Float32Array, Group, SampleStatus, Segment
from rollq.buffer.values.sample_columns import Samples
from rollq.buffer.wire.arrays import load_array


def group_credit(
    group: Group, valid: BoolArray, settings: AdvantageSettings, kind: StepKind, discount: float
) -> list[Float32Array]:
    """Token advantages for each segment of the `valid` samples, float32 [P + R] per segment, 0 on prompts.

    `valid` is bool [samples]. Samples that could not be read get 0. Raises the exceptions of `Batch.with_credit`.
    """
    if group.shaped is not None:
        raise InvalidGroup(
            f"{_name(group)} has rewards of a pipeline, which apply to whole samples: set credit = "
            '"sample" in [trainer]'
        )
    chosen = list(_chosen(Samples.of(group.samples), valid))
    read = [segments for segments, is_read in chosen if is_read]
    advantages_read = token_advantages(
        [_rewards(group, segments) for segments in read],
        [steps_of(segments, kind) for segments in read],
        np.zeros(len(read), np.int64),
        settings,
        discount=discount,
    )
    computed = iter(advantages_read)
    by_sample = (next(computed) if is_read else np.zeros(_tokens(segments), np.float32) for segments, is_read in chosen)
    segments_of = (segments for segments, _ in chosen)
    return list(chain.from_iterable(map(_by_segment, segments_of, by_sample)))


def _tokens(segments: list[Segment]) -> int:
    return sum(len(segment.response_ids) for segment in segments)


def _chosen(samples: Samples, valid: BoolArray) -> Iterator[tuple[list[Segment], bool]]:
    """Each valid sample's segments with tokens, and whether the sample could be read."""
    for segments, status, is_valid in zip(samples.segments, samples.statuses, valid, strict=True):
        if is_valid:
            with_tokens = [segment for segment in segments if len(segment.prompt_ids) + len(segment.response_ids)]
            yield with_tokens, status is not SampleStatus.FAILED


def _by_segment(segments: list[Segment], values: Float32Array) -> list[Float32Array]:
    """Split the advantages of a sample's response tokens, float32 [R], by segment; prompts get 0."""
    parts = np.split(values, np.cumsum([len(segment.response_ids) for segment in segments])[:-1])
    return [
        np.concatenate([np.zeros(len(segment.prompt_ids), np.float32), part])
        for segment, part in zip(segments, parts, strict=True)
    ]


def _rewards(group: Group, segments: list[Segment]) -> Float32Array:
    """The rewards of a sample's response tokens, float32 [R] over all segments."""
    return np.concatenate([np.zeros(0, np.float32), *(_of_segment(group, segment) for segment in segments)])


def _of_segment(group: Group, segment: Segment) -> Float32Array:
    array = segment.arrays.get(TOKEN_REWARDS)
    if array is None:
        raise InvalidGroup(
            f"{_name(group)} has no array {TOKEN_REWARDS!r}, which credit in [trainer] needs: have the task's "
            "judge return Credit(turns=...) or Credit(tokens=...), or set judge_options = { turn_rewards = true } of "
            'judge "environment", or credit = "sample"'
        )
    rewards = np.asarray(load_array(array), np.float32)
    if rewards.shape != segment.response_ids.shape or not np.isfinite(rewards).all():
        raise InvalidGroup(
            f"{_name(group)} has an array {TOKEN_REWARDS!r} of shape {list(rewards.shape)}; expected finite numbers "
            f"of shape {list(segment.response_ids.shape)}, one for each response token"
        )
    return rewards


def _name(group: Group) -> str:
    return f"group {group.group_id} of task {group.task!r}"
