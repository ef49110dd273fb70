"""Samples that are stored part by part while they are made.

A part is a sample that holds only the tokens that earlier parts lack. Its first segment has no prompt if it continues
the previous part's last segment; the part's other fields describe the whole sample so far. In Redis, a part is a frame
after 12 bytes, little endian: the index of its sample, the number of response tokens before the part (0: it replaces
all earlier parts), and how many of its response tokens are new.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from rollq.buffer.errors import CorruptFrame
from rollq.buffer.values.rollouts import NamedArrays, Sample, SamplePart, Segment, VersionSpan
from rollq.buffer.wire.frame_decoding import decode_sample
from rollq.buffer.wire.frame_encoding import encode_samples

_HEAD = struct.Struct("<III")


def encode_part(part: SamplePart) -> bytes:
    """Encode a part. Raises `InvalidGroup` like `encode_samples`."""
    new_tokens = max(part.sample.response_tokens - part.tokens_again, 0)
    head = _HEAD.pack(part.index, part.tokens_before, new_tokens)
    return head + encode_samples([part.sample])


def decode_parts(index: int, stored: Mapping[int, bytes], *, group_size: int) -> Sample | None:
    """Decode sample number `index` from its group's `stored` fields: frames by index, and parts from `group_size` on.
    Returns None if nothing of it is stored. Raises `CorruptFrame`, including for a missing part.
    """
    frames = [(0, stored[index])] if index in stored else []
    for owner, tokens_before, _, frame in _parts(stored, group_size):
        if owner != index:
            continue
        if tokens_before == 0:
            frames = []
        frames.append((tokens_before, frame))
    parts: list[Sample] = []
    tokens = 0
    for tokens_before, frame in frames:
        if tokens_before != tokens:
            raise CorruptFrame(f"a part follows {tokens_before} tokens, but {tokens} are stored before it")
        parts.append(decode_sample(frame))
        tokens += parts[-1].response_tokens
    return join_parts(parts) if parts else None


def tokens_in_parts(stored: Mapping[int, bytes], *, group_size: int) -> int:
    """The number of response tokens in all of a group's `stored` parts, each counted once."""
    return sum(tokens for _, _, tokens, _ in _parts(stored, group_size))


def _parts(stored: Mapping[int, bytes], group_size: int) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the parts, in order: sample index, response tokens before the part, new tokens in the part, and its frame.

    Parts without a complete head are left out; a later part of the same sample then follows a gap.
    """
    for field in sorted(stored):
        raw = stored[field]
        if field >= group_size and len(raw) >= _HEAD.size:
            index, tokens_before, tokens = _HEAD.unpack_from(raw)
            yield index, tokens_before, tokens, raw[_HEAD.size :]


def rest_of(sample: Sample, tokens: int) -> Sample:
    """The part of `sample` after its first `tokens` response tokens."""
    rest, left = [], tokens
    for segment in sample.segments:
        count = len(segment.response_ids)
        if left < count:
            rest.append(_after(segment, left) if left else segment)
        left = max(left - count, 0)
    return replace(sample, segments=tuple(rest))


def join_parts(parts: Sequence[Sample]) -> Sample:
    """Join one or more parts into the sample that they make up."""
    runs: list[list[Segment]] = []
    for part in parts:
        for segment in part.segments:
            if runs and len(segment.prompt_ids) == 0:
                runs[-1].append(segment)
            else:
                runs.append([segment])
    return replace(parts[-1], segments=tuple(_joined(run) if len(run) > 1 else run[0] for run in runs))


def join_spans(first: tuple[VersionSpan, ...], second: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    """All spans, with adjacent spans of the same weights merged."""
    if first and second and first[-1][:2] == second[0][:2]:
        epoch, version, tokens = first[-1]
        second = (VersionSpan(epoch, version, tokens + second[0].tokens), *second[1:])
        first = first[:-1]
    return first + second


def _after(segment: Segment, tokens: int) -> Segment:
    """The tokens of a segment after its first `tokens`, without a prompt."""
    prompt, count = len(segment.prompt_ids), len(segment.response_ids)
    return Segment(
        prompt_ids=segment.prompt_ids[:0],
        response_ids=segment.response_ids[tokens:],
        logprobs=segment.logprobs[tokens:],
        versions=_spans_after(segment.versions, tokens),
        loss_mask=None if segment.loss_mask is None else segment.loss_mask[tokens:],
        arrays={
            name: array[len(array) - count + tokens :]
            for name, array in segment.arrays.items()
            if isinstance(array, np.ndarray) and array.ndim and len(array) in (count, prompt + count)
        },
    )


def _spans_after(spans: Sequence[VersionSpan], tokens: int) -> tuple[VersionSpan, ...]:
    rest: list[VersionSpan] = []
    for epoch, version, count in spans:
        if tokens < count:
            rest.append(VersionSpan(epoch, version, count - tokens))
        tokens = max(tokens - count, 0)
    return tuple(rest)


def _joined(run: Sequence[Segment]) -> Segment:
    """One segment, joined from segments that continue each other."""
    masked = any(segment.loss_mask is not None for segment in run)
    return Segment(
        prompt_ids=run[0].prompt_ids,
        response_ids=np.concatenate([segment.response_ids for segment in run]),
        logprobs=np.concatenate([segment.logprobs for segment in run]),
        versions=reduce(join_spans, [segment.versions for segment in run]),
        loss_mask=np.concatenate([_mask(segment) for segment in run]) if masked else None,
        arrays=_joined_arrays(run),
    )


def _mask(segment: Segment) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.ones(len(segment.response_ids), np.bool_) if segment.loss_mask is None else segment.loss_mask


def _joined_arrays(run: Sequence[Segment]) -> NamedArrays:
    """Join per-token arrays, which every later segment has; take other arrays from the first segment."""
    first, *others = run
    return {
        name: np.concatenate([segment.arrays[name] for segment in run])
        if all(name in segment.arrays for segment in others)
        else array
        for name, array in first.arrays.items()
    }
