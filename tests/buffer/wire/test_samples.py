"""Frames keep samples exactly, other programs can read them, and damaged ones are recognised as such."""

import copy
import struct
import zlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import orjson
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollq.buffer.errors import CorruptFrame, InvalidGroup
from rollq.buffer.rollouts import EMPTY_SAMPLE, ArrayRef, FinishReason, Sample, SampleStatus, Segment, VersionSpan
from rollq.buffer.wire import samples as codec
from rollq.buffer.wire.samples import FRAME_VERSION, MAGIC, PREFIX, decode_sample, encode_group, encode_sample

PROFILE = settings(derandomize=True, max_examples=100, deadline=None, database=None)

DTYPES = ["?", "i1", "i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8"]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc/", max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
JSON_OBJECTS = st.dictionaries(st.text("abc/", max_size=3), JSON, max_size=3)
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    spans = draw(st.lists(st.builds(VersionSpan, st.integers(0, 9), st.integers(0, 9), st.integers(1, 5)), max_size=3))
    tokens = sum(span.tokens for span in spans)
    ids = hnp.from_dtype(np.dtype(np.int32), min_value=0)
    return Segment(
        prompt_ids=draw(hnp.arrays(np.int32, st.integers(1, 5), elements=ids)),
        response_ids=draw(hnp.arrays(np.int32, tokens, elements=ids)),
        logprobs=draw(hnp.arrays(np.float32, tokens, elements=st.floats(-1024, 0, width=32))),
        versions=tuple(spans),
        loss_mask=draw(st.none() | hnp.arrays(np.bool_, tokens)),
        arrays=draw(st.dictionaries(st.text(max_size=4).filter(str.isprintable), ARRAYS, max_size=3)),
    )


SAMPLES = st.builds(
    Sample,
    segments=st.lists(segments(), max_size=3).map(tuple),
    status=st.sampled_from(SampleStatus),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    reward_parts=st.dictionaries(st.text("ab", max_size=2), st.floats(allow_nan=False, allow_infinity=False)),
    text=st.text(st.characters(exclude_categories=["Cs"])),
    error=st.none() | st.text("ab\n", max_size=3),
    sampling=JSON_OBJECTS,
    extra=JSON_OBJECTS,
    session_id=st.none() | st.text("ab/", max_size=3),
    tools=st.lists(JSON_OBJECTS, max_size=2).map(tuple),
    tool_choice=st.none() | st.just("auto") | JSON_OBJECTS,
)


def a_segment(tokens: int = 4, **changes: Any) -> Segment:
    fields: dict[str, Any] = {
        "prompt_ids": np.arange(3, dtype=np.int32),
        "response_ids": np.arange(10, 10 + tokens, dtype=np.int32),
        "logprobs": np.linspace(-2, 0, tokens, dtype=np.float32),
        "versions": (VersionSpan(0, 7, tokens),),
    }
    return Segment(**(fields | changes))


def a_sample(*segments: Segment, **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "segments": segments or (a_segment(),),
        "status": SampleStatus.COMPLETED,
        "finish_reason": FinishReason.STOP,
        "reward": 0.5,
        "reward_parts": {"exact": 1.0, "length": -0.5},
        "text": "42",
        "sampling": {"temperature": 1.0, "seed": None},
    }
    return Sample(**(fields | changes))


def assert_same_array(got: Any, expected: Any) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


def assert_same_sample(got: Sample, expected: Sample) -> None:
    for name in (field.name for field in fields(Sample) if field.name != "segments"):
        value = getattr(got, name)
        assert value == getattr(expected, name)
        assert repr(value) == repr(getattr(expected, name))
    assert len(got.segments) == len(expected.segments)
    for mine, theirs in zip(got.segments, expected.segments, strict=True):
        for name in ("prompt_ids", "response_ids", "logprobs"):
            assert_same_array(getattr(mine, name), getattr(theirs, name))
        assert mine.versions == theirs.versions
        assert all(type(span) is VersionSpan for span in mine.versions)
        assert (mine.loss_mask is None) == (theirs.loss_mask is None)
        if mine.loss_mask is not None:
            assert_same_array(mine.loss_mask, theirs.loss_mask)
        assert mine.arrays.keys() == theirs.arrays.keys()
        for name, array in theirs.arrays.items():
            assert_same_array(mine.arrays[name], array)


def open_frame(frame: bytes) -> tuple[dict[str, Any], bytes]:
    """The JSON header and the data of a frame's safetensors blob."""
    (length,) = struct.unpack_from("<Q", frame, PREFIX.size)
    data_at = PREFIX.size + 8 + length
    return orjson.loads(frame[PREFIX.size + 8 : data_at]), frame[data_at:]


def checksummed(body: bytes) -> bytes:
    return PREFIX.pack(MAGIC, FRAME_VERSION, len(body), zlib.crc32(body)) + body


def sealed(header: Any, data: bytes) -> bytes:
    """A frame with a right checksum, whatever is in it."""
    encoded = orjson.dumps(header)
    return checksummed(struct.pack("<Q", len(encoded)) + encoded + data)


@PROFILE
@given(SAMPLES)
def test_xd01_any_sample_comes_back_as_it_was(sample: Sample) -> None:
    assert_same_sample(decode_sample(encode_sample(sample)), sample)


@PROFILE
@given(SAMPLES)
def test_safetensors_reads_a_frame_behind_its_prefix(sample: Sample) -> None:
    tensors = safetensors.numpy.load(encode_sample(sample)[PREFIX.size :])
    joined = [ids for segment in sample.segments for ids in (segment.prompt_ids, segment.response_ids)]
    assert_same_array(tensors.pop("ids"), np.concatenate([np.zeros(0, np.int32), *joined]))
    logprobs = [segment.logprobs for segment in sample.segments]
    assert_same_array(tensors.pop("logprobs"), np.concatenate([np.zeros(0, np.float32), *logprobs]))
    assert orjson.loads(tensors.pop("meta").tobytes())["text"] == sample.text
    masks = [segment.loss_mask for segment in sample.segments]
    if any(mask is not None for mask in masks):
        whole = [np.ones(len(logprobs[i]), np.bool_) if mask is None else mask for i, mask in enumerate(masks)]
        assert_same_array(tensors.pop("loss_mask"), np.concatenate(whole))
    named = {
        f"s{i}/{name}": array for i, segment in enumerate(sample.segments) for name, array in segment.arrays.items()
    }
    assert tensors.keys() == named.keys()
    for name, array in named.items():
        assert_same_array(tensors[name], array)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3), (2, 1, 3)])
def test_xd02_a_named_array_keeps_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    decoded = decode_sample(encode_sample(a_sample(a_segment(arrays={"x": array}))))
    assert_same_array(decoded.segments[0].arrays["x"], array)


def test_arrays_that_are_not_contiguous_keep_their_values() -> None:
    board = np.arange(24, dtype=np.int32).reshape(4, 6)
    segment = a_segment(response_ids=board[:, 1], loss_mask=np.tile([True, False], 4)[::2], arrays={"t": board.T})
    decoded = decode_sample(encode_sample(a_sample(segment))).segments[0]
    assert decoded.response_ids.tolist() == [1, 7, 13, 19]
    assert decoded.loss_mask is not None
    assert decoded.loss_mask.tolist() == [True] * 4
    assert_same_array(decoded.arrays["t"], np.ascontiguousarray(board.T))


def test_decoded_arrays_are_aligned_read_only_views_of_the_frame() -> None:
    named = {"a": np.arange(3, dtype=np.int8), "b": np.arange(3.0), "c": np.arange(3, dtype=np.float16)}
    sample = a_sample(a_segment(5, loss_mask=np.ones(5, np.bool_), arrays=named), a_segment(3))
    frame = encode_sample(sample)
    for segment in decode_sample(frame).segments:
        arrays = [segment.prompt_ids, segment.response_ids, segment.logprobs, *segment.arrays.values()]
        for array in arrays if segment.loss_mask is None else [*arrays, segment.loss_mask]:
            assert isinstance(array, np.ndarray)
            assert np.shares_memory(array, np.frombuffer(frame, np.uint8))
            assert array.flags.aligned
            assert not array.flags.writeable


def test_none_and_empty_stay_apart() -> None:
    empty = a_sample(
        a_segment(0, versions=(), loss_mask=np.zeros(0, np.bool_)), a_segment(0, versions=()), error="", text=""
    )
    decoded = decode_sample(encode_sample(empty))
    assert decoded.segments[0].loss_mask is not None
    assert decoded.segments[1].loss_mask is None
    assert decoded.error == ""
    assert decode_sample(encode_sample(a_sample())).error is None
    assert_same_sample(decode_sample(encode_sample(EMPTY_SAMPLE)), EMPTY_SAMPLE)


def test_numpy_numbers_become_plain_ones_of_the_same_value() -> None:
    sample = a_sample(reward=np.float32(0.1), reward_parts={"x": np.float32(0.2)}, extra={"n": np.int64(3)})
    decoded = decode_sample(encode_sample(sample))
    assert decoded.reward == float(np.float32(0.1))
    assert decoded.reward_parts == {"x": float(np.float32(0.2))}
    assert decoded.extra == {"n": 3}


@pytest.mark.parametrize(
    ("sample", "field"),
    [
        (a_sample(a_segment(arrays={"x": np.array([None])})), r"segments\[0\]\.arrays\['x'\] is object"),
        (a_sample(a_segment(arrays={"x": np.zeros(2, ">f4")})), r"arrays\['x'\] is >f4"),
        (a_sample(a_segment(arrays={"x": np.zeros(2, "M8[s]")})), r"arrays\['x'\] is datetime64"),
        (a_sample(a_segment(), a_segment(arrays={"x": [1.0]})), r"segments\[1\]\.arrays\['x'\] is list"),
        (a_sample(a_segment(arrays={"\ud800": np.zeros(2)})), "name of an array"),
        (a_sample(a_segment(logprobs=np.zeros(3, np.float32))), "disagree"),
        (a_sample(a_segment(response_ids=np.zeros(4, np.int64))), "disagree"),
        (a_sample(sampling={"stop": {"a", "b"}}), "sampling cannot be written as JSON"),
        (a_sample(extra={1: 2}), "extra cannot be written as JSON"),
        (a_sample(extra={"n": 2**70}), "extra cannot be written as JSON"),
        (a_sample(text="\ud800"), "text cannot be written as JSON"),
    ],
)
def test_what_a_frame_cannot_hold_is_refused_by_name(sample: Sample, field: str) -> None:
    with pytest.raises(InvalidGroup, match=field):
        encode_sample(sample)


def test_an_error_in_a_group_names_the_sample() -> None:
    bad = a_sample(a_segment(arrays={"x": np.array(["a"])}))
    with pytest.raises(InvalidGroup, match=r"sample 1: segments\[0\]\.arrays\['x'\] is <U1"):
        encode_group([a_sample(), bad], group_size=2)


def test_a_group_that_cannot_be_trained_on_is_not_encoded() -> None:
    with pytest.raises(InvalidGroup, match="sample 0: reward is missing"):
        encode_group([a_sample(reward=None)], group_size=1)


def test_a_group_above_the_limit_is_refused_with_both_sizes() -> None:
    group = [a_sample(), a_sample()]
    size = sum(len(frame) for frame in encode_group(group, group_size=2))
    assert len(encode_group(group, group_size=2, max_bytes=size)) == 2
    with pytest.raises(InvalidGroup, match=f"{size} bytes encoded, more than the limit of {size - 1}"):
        encode_group(group, group_size=2, max_bytes=size - 1)


def test_a_frame_that_redis_could_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 200)
    with pytest.raises(InvalidGroup, match="exceeds the 200 bytes of a Redis string"):
        encode_sample(a_sample())


def test_every_flipped_bit_is_noticed() -> None:
    frame = encode_sample(a_sample())
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFrame):
            decode_sample(bytes(damaged))


def test_every_truncation_is_noticed() -> None:
    frame = encode_sample(a_sample())
    for length in range(len(frame)):
        with pytest.raises(CorruptFrame, match="truncated"):
            decode_sample(frame[:length])
    with pytest.raises(CorruptFrame, match="extended"):
        decode_sample(frame + b"\0")


def test_a_corrupt_frame_says_what_is_wrong() -> None:
    frame = encode_sample(a_sample())
    with pytest.raises(CorruptFrame, match=r"begins with b'RIFF'"):
        decode_sample(b"RIFF" + frame[4:])
    with pytest.raises(CorruptFrame, match="schema version 2, this rollq reads 1"):
        decode_sample(frame[:4] + b"\2\0\0\0" + frame[8:])
    with pytest.raises(CorruptFrame, match=f"frame of {len(frame)} bytes has CRC-32"):
        decode_sample(frame[:-1] + b"\0")
    with pytest.raises(CorruptFrame, match="claims a header of 999999 bytes"):
        decode_sample(checksummed(struct.pack("<Q", 999999) + b"{}"))
    with pytest.raises(CorruptFrame, match="not a sample: KeyError: 'meta'"):
        decode_sample(sealed({}, b""))


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("ids", {"dtype": "I32", "shape": [7], "data_offsets": [-28, 0]}),
        ("ids", {"dtype": "I32", "shape": [7], "data_offsets": [28, 0]}),
        ("ids", {"dtype": "I32", "shape": [7], "data_offsets": [2**63 - 30, 2**63 - 2]}),
        ("ids", {"dtype": "I32", "shape": [-1], "data_offsets": [0, 28]}),
        ("ids", {"dtype": "I32", "shape": [6], "data_offsets": [0, 24]}),
        ("ids", {"dtype": "I32", "shape": [2**40, 2**40], "data_offsets": [0, 28]}),
        ("ids", {"dtype": "BF16", "shape": [7], "data_offsets": [0, 14]}),
        ("ids", {"dtype": "I32", "shape": [7], "data_offsets": [0]}),
        ("logprobs", {"dtype": "F32", "shape": [10**5], "data_offsets": [28, 28 + 4 * 10**5]}),
        ("s1/x", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
        ("x", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
        ("meta", {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}),
    ],
)
def test_a_header_that_lies_is_corrupt(name: str, entry: Mapping[str, Any]) -> None:
    header, data = open_frame(encode_sample(a_sample()))
    header[name] = entry
    with pytest.raises(CorruptFrame, match="content is not a sample"):
        decode_sample(sealed(header, data))


@PROFILE
@given(st.binary(max_size=200))
def test_random_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptFrame):
        decode_sample(data)
    with pytest.raises(CorruptFrame):
        decode_sample(checksummed(data))


@pytest.mark.parametrize("mask", [0x01, 0x10, 0x80, 0xFF])
def test_a_changed_byte_behind_a_right_checksum_is_a_sample_or_corrupt(mask: int) -> None:
    body = encode_sample(a_sample(a_segment(arrays={"x": np.arange(3.0)})))[PREFIX.size :]
    refused = 0
    for position in range(len(body)):
        changed = bytearray(body)
        changed[position] ^= mask
        try:
            decoded = decode_sample(checksummed(bytes(changed)))
        except CorruptFrame:
            refused += 1
        else:
            assert isinstance(decoded, Sample)
    assert refused > 100


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the parts of a JSON value are."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key, part in inner for found in paths(part, (*path, key))]


def mutated(value: Any, data: st.DataObject) -> Any:
    """A JSON value of which one part was replaced or removed."""
    changed = copy.deepcopy(value)
    *way, last = data.draw(st.sampled_from(paths(value)))
    owner = changed
    for key in way:
        owner = owner[key]
    if data.draw(st.booleans()):
        owner[last] = data.draw(JSON | st.integers(-9, 99) | st.integers(2**31, 2**64 - 1))
    else:
        del owner[last]
    return changed


@settings(PROFILE, max_examples=400)
@given(st.data())
def test_a_sealed_frame_with_wrong_content_is_a_sample_or_corrupt(data: st.DataObject) -> None:
    sample = a_sample(
        a_segment(arrays={"x": np.arange(6.0).reshape(2, 3), "far": ArrayRef("file:///far", "0f", (2, 3), "float64")}),
        a_segment(2, loss_mask=np.ones(2, np.bool_)),
    )
    header, blob = open_frame(encode_sample(sample))
    begin, end = header["meta"]["data_offsets"]
    if data.draw(st.booleans()):
        header = mutated(header, data)
    else:
        meta = orjson.dumps(mutated(orjson.loads(blob[begin:end]), data))
        header["meta"] = {"dtype": "U8", "shape": [len(meta)], "data_offsets": [begin, begin + len(meta)]}
        blob = blob[:begin] + meta
    try:
        decoded = decode_sample(sealed(header, blob))
    except CorruptFrame:
        return
    assert isinstance(decoded, Sample)
