"""Frames keep samples exactly, other programs can read them, and damaged ones are recognised as such."""

import copy
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import orjson
import pytest
import safetensors.numpy
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rollq.buffer.errors import CorruptFrame, InvalidGroup
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, NO_EPOCH, NO_VERSION, ArrayRef, Sample, VersionSpan
from rollq.buffer.values.sample_columns import Samples
from rollq.buffer.wire import frame_encoding
from rollq.buffer.wire.frame_decoding import decode_sample, decode_samples
from rollq.buffer.wire.frame_encoding import encode_samples
from rollq.buffer.wire.frame_format import FRAME_VERSION, MAGIC, PREFIX
from support.made_samples import (
    DTYPES,
    JSON,
    PROFILE,
    SAMPLES,
    a_sample,
    a_segment,
    assert_same_array,
    assert_same_sample,
)


def open_frame(frame: bytes) -> tuple[dict[str, Any], bytes]:
    """The JSON header and the data of a frame's safetensors blob."""
    (length,) = struct.unpack_from("<Q", frame, PREFIX.size)
    data_at = PREFIX.size + 8 + length
    return orjson.loads(frame[PREFIX.size + 8 : data_at]), frame[data_at:]


def checksummed(body: bytes) -> bytes:
    return PREFIX.pack(MAGIC, FRAME_VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body


def sealed(header: Any, data: bytes) -> bytes:
    """A frame with a right checksum, whatever is in it."""
    encoded = orjson.dumps(header)
    return checksummed(struct.pack("<Q", len(encoded)) + encoded + data)


@PROFILE
@given(SAMPLES)
def test_xd01_any_sample_comes_back_as_it_was(sample: Sample) -> None:
    assert_same_sample(decode_sample(encode_samples([sample])), sample)


@PROFILE
@given(st.lists(SAMPLES, max_size=4))
def test_any_group_comes_back_as_it_was(samples: list[Sample]) -> None:
    decoded = decode_samples(encode_samples(samples))
    assert len(decoded) == len(samples)
    for got, expected in zip(decoded, samples, strict=True):
        assert_same_sample(got, expected)
    assert encode_samples(decoded) == encode_samples(samples)


@PROFILE
@given(st.lists(SAMPLES, max_size=3))
def test_safetensors_reads_a_frame_behind_its_prefix(samples: list[Sample]) -> None:
    tensors = safetensors.numpy.load(encode_samples(samples)[PREFIX.size :])
    segments = [segment for sample in samples for segment in sample.segments]
    responses = [segment.response_ids for segment in segments]
    assert_same_array(tensors.pop("ids"), np.concatenate([np.zeros(0, np.int32), *responses]))
    logprobs = [segment.logprobs for segment in segments]
    assert_same_array(tensors.pop("logprobs"), np.concatenate([np.zeros(0, np.float32), *logprobs]))
    different = dict.fromkeys(segment.prompt_ids.tobytes() for segment in segments)
    assert tensors.pop("prompts").tobytes() == b"".join(different)
    assert orjson.loads(tensors.pop("layout").tobytes())["samples"][0] == [sample.status for sample in samples]
    assert orjson.loads(tensors.pop("details").tobytes()).keys() == {"shared", "each"}
    masks = [segment.loss_mask for segment in segments]
    if any(mask is not None for mask in masks):
        whole = [np.ones(len(logprobs[i]), np.bool_) if mask is None else mask for i, mask in enumerate(masks)]
        assert_same_array(tensors.pop("loss_mask"), np.concatenate(whole))
    named = {f"s{i}/{name}": array for i, segment in enumerate(segments) for name, array in segment.arrays.items()}
    assert tensors.keys() == named.keys()
    for name, array in named.items():
        assert_same_array(tensors[name], array)


def test_what_siblings_share_is_stored_once() -> None:
    prompt = np.arange(1000, dtype=np.int32)
    tools = ({"name": "search", "description": "x" * 1000},)
    group = [a_sample(a_segment(prompt_ids=prompt.copy()), tools=tools, text=str(i)) for i in range(8)]
    alone = len(encode_samples(group[:1]))
    assert alone > 5000
    assert len(encode_samples(group)) < alone + 7 * 200
    decoded = decode_samples(encode_samples(group))
    assert len({segment.prompt_ids.ctypes.data for [segment] in decoded.segments}) == 1
    assert [sample.tools for sample in decoded] == [tools] * 8
    assert [sample.text for sample in decoded] == list("01234567")


def test_values_that_are_equal_in_python_alone_stay_apart() -> None:
    values: list[Any] = [1, 1.0, True, np.arange(2), [0, 1]]
    decoded = decode_samples(encode_samples([a_sample(extra={"x": value}) for value in values]))
    assert [repr(sample.extra["x"]) for sample in decoded] == ["1", "1.0", "True", "[0, 1]", "[0, 1]"]


def test_prompts_of_the_same_length_stay_apart() -> None:
    prompts = [np.full(3, number, np.int32) for number in (1, 2, 1)]
    decoded = decode_samples(encode_samples([a_sample(a_segment(prompt_ids=ids)) for ids in prompts]))
    assert [sample.segments[0].prompt_ids.tolist() for sample in decoded] == [[1, 1, 1], [2, 2, 2], [1, 1, 1]]
    assert len({segment.prompt_ids.ctypes.data for [segment] in decoded.segments}) == 2


def test_training_reads_fields_without_objects() -> None:
    decoded = decode_samples(encode_samples([a_sample(), a_sample(reward=-1.0)]))
    assert decoded.rewards == (0.5, -1.0)
    assert decoded.temperatures == (1.0, 1.0)
    assert [segment.response_ids.tolist() for [segment] in decoded.segments] == [[10, 11, 12, 13]] * 2
    assert "objects" not in vars(decoded)
    assert decoded[1].reward == -1.0
    assert "objects" in vars(decoded)


def test_siblings_do_not_share_what_can_be_changed() -> None:
    first, second = decode_samples(encode_samples([a_sample(extra={"n": 1})] * 2))
    first.extra["n"] = 2  # type: ignore[index]
    assert second.extra == {"n": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", None),
        ("text", None),
        ("sampling", []),
        ("extra", None),
        ("reward_parts", 1),
        ("error", 1),
        ("failure", ""),
    ],
)
def test_details_of_another_type_are_corrupt_before_anything_is_trained(name: str, value: object) -> None:
    header, blob = open_frame(encode_samples([a_sample(), a_sample()]))
    begin, end = header["details"]["data_offsets"]
    details = orjson.loads(blob[begin:end])
    details["shared"][name] = value
    text = orjson.dumps(details)
    header["details"] = {"dtype": "U8", "shape": [len(text)], "data_offsets": [len(blob), len(blob) + len(text)]}
    with pytest.raises(CorruptFrame, match=f"content is not samples: ValueError: {name} of 2 samples is"):
        decode_samples(sealed(header, blob + text))


def test_a_segment_of_negative_length_is_corrupt() -> None:
    header, blob = open_frame(encode_samples([a_sample(a_segment(4), a_segment(4))]))
    begin, end = header["layout"]["data_offsets"]
    layout = orjson.loads(blob[begin:end])
    for row, tokens in zip(layout["segments"], (-2, 10), strict=True):  # still 8 in all
        row[2], row[4] = tokens, [[NO_EPOCH, NO_VERSION, tokens]]
    text = orjson.dumps(layout)
    header["layout"] = {"dtype": "U8", "shape": [len(text)], "data_offsets": [len(blob), len(blob) + len(text)]}
    with pytest.raises(CorruptFrame, match="content is not samples: ValueError: version spans"):
        decode_samples(sealed(header, blob + text))


@pytest.mark.parametrize("value", ["judge", 1, ["grader"], {"grader": 1}])
def test_an_unknown_kind_of_failure_is_corrupt(value: object) -> None:
    header, blob = open_frame(encode_samples([a_sample(), a_sample()]))
    begin, end = header["details"]["data_offsets"]
    details = orjson.loads(blob[begin:end])
    del details["shared"]["failure"]
    text = orjson.dumps(details | {"each": {"failure": [None, value]}})
    header["details"] = {"dtype": "U8", "shape": [len(text)], "data_offsets": [len(blob), len(blob) + len(text)]}
    with pytest.raises(CorruptFrame, match=r"content is not samples: ValueError: .* is not a valid FailureKind"):
        decode_samples(sealed(header, blob + text))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3), (2, 1, 3)])
def test_xd02_a_named_array_keeps_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    decoded = decode_sample(encode_samples([a_sample(a_segment(arrays={"x": array}))]))
    assert_same_array(decoded.segments[0].arrays["x"], array)


def test_arrays_that_are_not_contiguous_keep_their_values() -> None:
    board = np.arange(24, dtype=np.int32).reshape(4, 6)
    segment = a_segment(response_ids=board[:, 1], loss_mask=np.tile([True, False], 4)[::2], arrays={"t": board.T})
    decoded = decode_sample(encode_samples([a_sample(segment)])).segments[0]
    assert decoded.response_ids.tolist() == [1, 7, 13, 19]
    assert decoded.loss_mask is not None
    assert decoded.loss_mask.tolist() == [True] * 4
    assert_same_array(decoded.arrays["t"], np.ascontiguousarray(board.T))


def test_decoded_arrays_are_aligned_read_only_views_of_the_frame() -> None:
    named = {"a": np.arange(3, dtype=np.int8), "b": np.arange(3.0), "c": np.arange(3, dtype=np.float16)}
    sample = a_sample(a_segment(5, loss_mask=np.ones(5, np.bool_), arrays=named), a_segment(3))
    frame = encode_samples([sample])
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
    decoded = decode_sample(encode_samples([empty]))
    assert decoded.segments[0].loss_mask is not None
    assert decoded.segments[1].loss_mask is None
    assert decoded.error == ""
    assert decode_sample(encode_samples([a_sample()])).error is None
    assert_same_sample(decode_sample(encode_samples([EMPTY_SAMPLE])), EMPTY_SAMPLE)


def test_numpy_numbers_become_plain_ones_of_the_same_value() -> None:
    sample = a_sample(reward=np.float32(0.1), reward_parts={"x": np.float32(0.2)}, extra={"n": np.int64(3)})
    decoded = decode_sample(encode_samples([sample]))
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
        (a_sample(extra={"n": {1}}), "extra cannot be written as JSON"),
        (a_sample(tools=None), "tools is None, expected list or tuple"),
        (a_sample(sampling=None), "sampling is None, expected a mapping"),
        (a_sample(extra=[1]), r"extra is \[1\], expected dict"),
        (a_sample(text="\ud800"), "text cannot be written as JSON"),
        (a_sample(sampling={"temperature": "warm"}), r"sampling\['temperature'\] is 'warm', expected a finite number"),
        (a_sample(a_segment(versions=(VersionSpan(2**70, 0, 4),))), "versions .* cannot be written as JSON"),
    ],
)
def test_what_a_frame_cannot_hold_is_refused_by_name(sample: Sample, field: str) -> None:
    with pytest.raises(InvalidGroup, match=field):
        encode_samples([sample])


def test_an_error_in_a_group_names_the_sample() -> None:
    bad = a_sample(a_segment(), a_segment(arrays={"x": np.array(["a"])}))
    with pytest.raises(InvalidGroup, match=r"sample 1: segments\[1\]\.arrays\['x'\] is <U1"):
        encode_samples([a_sample(), bad])
    with pytest.raises(InvalidGroup, match="sample 1: extra cannot be written as JSON"):
        encode_samples([a_sample(), a_sample(extra={1: 2})])


def test_a_frame_that_redis_could_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_encoding, "MAX_FRAME_BYTES", 200)
    with pytest.raises(InvalidGroup, match="exceeds the 200 bytes of a Redis string"):
        encode_samples([a_sample()])


def test_every_flipped_bit_is_noticed() -> None:
    frame = encode_samples([a_sample()])
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFrame):
            decode_sample(bytes(damaged))


def test_every_truncation_is_noticed() -> None:
    frame = encode_samples([a_sample()])
    for length in range(len(frame)):
        with pytest.raises(CorruptFrame, match="truncated"):
            decode_sample(frame[:length])
    with pytest.raises(CorruptFrame, match="extended"):
        decode_sample(frame + b"\0")


def test_a_corrupt_frame_says_what_is_wrong() -> None:
    frame = encode_samples([a_sample()])
    with pytest.raises(CorruptFrame, match=r"begins with b'RIFF'"):
        decode_sample(b"RIFF" + frame[4:])
    with pytest.raises(CorruptFrame, match="schema version 4, this rollq reads 3"):
        decode_sample(frame[:4] + b"\4\0\0\0" + frame[8:])
    with pytest.raises(CorruptFrame, match=f"frame of {len(frame)} bytes has xxh3_64"):
        decode_sample(frame[:-1] + b"\0")
    with pytest.raises(CorruptFrame, match="claims a header of 999999 bytes"):
        decode_sample(checksummed(struct.pack("<Q", 999999) + b"{}"))
    with pytest.raises(CorruptFrame, match="not samples: KeyError: 'layout'"):
        decode_sample(sealed({}, b""))


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("ids", {"dtype": "I32", "shape": [7], "data_offsets": [-28, 0]}),
        ("prompts", {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}),
        ("prompts", {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}),
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
        ("layout", {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}),
    ],
)
def test_a_header_that_lies_is_corrupt(name: str, entry: Mapping[str, Any]) -> None:
    header, data = open_frame(encode_samples([a_sample()]))
    header[name] = entry
    with pytest.raises(CorruptFrame, match="content is not samples"):
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
    body = encode_samples([a_sample(a_segment(arrays={"x": np.arange(3.0)}))])[PREFIX.size :]
    refused = 0
    for position in range(len(body)):
        changed = bytearray(body)
        changed[position] ^= mask
        try:
            decoded = decode_samples(checksummed(bytes(changed)))
        except CorruptFrame:
            refused += 1
        else:
            assert_sound(decoded)
    assert refused > 100


def assert_sound(samples: Samples) -> None:
    """Columns that fit together, and samples that can be made of them or are corrupt."""
    for segment in (segment for segments in samples.segments for segment in segments):
        assert len(segment.response_ids) == len(segment.logprobs) == sum(span.tokens for span in segment.versions)
    assert all(reward is None or np.isfinite(reward) for reward in samples.rewards)
    with suppress(CorruptFrame):
        assert all(isinstance(sample, Sample) for sample in samples)


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
    header, blob = open_frame(encode_samples([sample, sample]))
    name = data.draw(st.sampled_from(["header", "layout", "details"]))
    if name == "header":
        header = mutated(header, data)
    else:
        begin, end = header[name]["data_offsets"]
        text = orjson.dumps(mutated(orjson.loads(blob[begin:end]), data))
        header[name] = {"dtype": "U8", "shape": [len(text)], "data_offsets": [len(blob), len(blob) + len(text)]}
        blob += text
    try:
        decoded = decode_samples(sealed(header, blob))
    except CorruptFrame:
        return
    assert_sound(decoded)
