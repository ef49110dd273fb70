"""Frames of one sample, as an older rollq stored them, are still read."""

import struct
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given

from rollq.buffer.errors import CorruptFrame
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, Sample, VersionSpan
from rollq.buffer.wire.sample_frames import decode_sample, decode_samples
from support.made_samples import PROFILE, SAMPLES, a_sample, a_segment, assert_same_sample
from support.old_frames import PREFIX, encode_old_frame, sealed_old


@PROFILE
@given(SAMPLES)
def test_any_sample_comes_back_as_it_was(sample: Sample) -> None:
    assert_same_sample(decode_sample(encode_old_frame(sample)), sample)


def test_an_empty_sample_comes_back() -> None:
    assert_same_sample(decode_sample(encode_old_frame(EMPTY_SAMPLE)), EMPTY_SAMPLE)


def test_every_flipped_bit_and_every_truncation_is_noticed() -> None:
    frame = encode_old_frame(a_sample())
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFrame):
            decode_samples(bytes(damaged))
    for length in range(len(frame)):
        with pytest.raises(CorruptFrame, match="truncated"):
            decode_samples(frame[:length])


@pytest.mark.parametrize("mask", [0x01, 0x10, 0x80, 0xFF])
def test_a_changed_byte_behind_a_right_checksum_is_a_sample_or_corrupt(mask: int) -> None:
    body = encode_old_frame(a_sample(a_segment(arrays={"x": np.arange(3.0)})))[PREFIX.size :]
    refused = 0
    for position in range(len(body)):
        changed = bytearray(body)
        changed[position] ^= mask
        try:
            decoded = decode_sample(sealed_old(bytes(changed)))
        except CorruptFrame:
            refused += 1
        else:
            assert isinstance(decoded, Sample)
    assert refused > 100


def test_a_frame_without_a_sample_says_so() -> None:
    empty = orjson.dumps({})
    with pytest.raises(CorruptFrame, match="not a sample: KeyError: 'meta'"):
        decode_samples(sealed_old(struct.pack("<Q", len(empty)) + empty))


@pytest.mark.parametrize("sampling", [{"temperature": "hot"}, [], None])
def test_a_sample_that_an_older_rollq_took_and_this_one_does_not_is_corrupt(sampling: Any) -> None:
    with pytest.raises(CorruptFrame, match="the checksum is right"):
        decode_samples(encode_old_frame(a_sample(sampling=sampling)))


def test_a_reward_that_is_no_number_is_corrupt() -> None:
    body = encode_old_frame(a_sample())[PREFIX.size :]
    changed = body.replace(b'"reward":0.5', b'"reward":"x"')
    assert changed != body
    with pytest.raises(CorruptFrame, match="the checksum is right"):
        decode_samples(sealed_old(changed))


@pytest.mark.parametrize("tokens", [3, 5])
def test_version_spans_that_do_not_cover_the_tokens_are_corrupt(tokens: int) -> None:
    wrong = a_sample(a_segment(4, versions=(VersionSpan(0, 7, tokens),)))
    with pytest.raises(CorruptFrame, match="version spans"):
        decode_samples(encode_old_frame(wrong))
