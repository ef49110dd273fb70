"""Groups that are plain, or nearly, for the compiled codec: its answers must be those of the Python code."""

import copy
import random
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import xxhash

from faults.mutations import mutate_bytes
from rollq.buffer.calls.put_args import encode_result, result_args
from rollq.buffer.errors import CorruptFrame
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import (
    EMPTY_SAMPLE,
    FinishReason,
    GroupResult,
    Lease,
    Prompt,
    Sample,
    SampleStatus,
    Segment,
    VersionSpan,
    unversioned,
)
from rollq.buffer.values.sample_columns import Samples
from rollq.buffer.wire import compiled
from rollq.buffer.wire.frame_decoding import decode_samples
from rollq.buffer.wire.frame_encoding import encode_samples
from rollq.buffer.wire.frame_format import FRAME_VERSION, MAGIC, PREFIX

Group = tuple[Sample, ...]
_HEADER_LENGTH = struct.Struct("<Q")

ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2**31, 2**70, 0.5, -0.0, float("nan"), float("inf"), -float("inf"), 1e39, 5e-324, "", "text",
    b"", (), [], {}, {"a": 1}, [1], np.float32(0.5), np.float64(2.5), np.int64(3), np.zeros(0), object, "\ud800",
)  # fmt: skip
ODD_ARRAYS: tuple[Callable[[Any], Any], ...] = (
    lambda array: array[::-1],
    lambda array: array[:-1],
    lambda array: array[None],
    lambda array: array.astype(np.float64),
    lambda array: array.astype(array.dtype.newbyteorder()),
    lambda array: array.astype(np.int64),
    lambda array: array.astype(np.uint32),
    lambda array: np.repeat(array, 2)[::2],
    lambda array: array.tolist(),
    lambda array: np.ma.masked_array(array),
    lambda array: array[:0],
    lambda array: np.full_like(array, -1),
    lambda array: np.full_like(array, np.iinfo(np.int32).max if array.dtype == np.int32 else np.nan),
    lambda array: np.full_like(array, 0 if array.dtype == np.int32 else -np.inf),
    lambda array: np.full_like(array, 0 if array.dtype == np.int32 else 1e-3),
    lambda array: np.full_like(array, 0 if array.dtype == np.int32 else 1.001e-3),
    lambda array: np.require(array.copy(), requirements=["W"]),
    lambda array: None,
)
ODD_SPANS: tuple[Callable[[int], Any], ...] = (
    lambda tokens: (),
    lambda tokens: (VersionSpan(1, 2, tokens + 1),),
    lambda tokens: (VersionSpan(1, 2, tokens), VersionSpan(1, 2, 0)),
    lambda tokens: (VersionSpan(1, True, tokens),),
    lambda tokens: (VersionSpan(-1, 2, tokens),),
    lambda tokens: (VersionSpan(1, 2**31, tokens),),
    lambda tokens: ((1, 2, tokens),),
    lambda tokens: [VersionSpan(1, 2, tokens)],
    lambda tokens: (VersionSpan(1, 2, 2**63),),
    lambda tokens: (VersionSpan(1, 2, np.int64(tokens)),),  # type: ignore[arg-type]
    unversioned,
)


def any_group(rng: random.Random) -> Group:
    """A plain group, in which up to two samples were changed in any way."""
    prompts = [np.array(rng.choices(range(9), k=rng.randint(1, 4)), np.int32) for _ in range(2)]
    sampling = {"temperature": rng.choice([0.7, 1.0, 1e-7, 1e16])}
    samples = [_sample(rng, prompts, sampling) for _ in range(rng.randint(1, 5))]
    for index in rng.sample(range(len(samples)), min(len(samples), rng.choice([0, 0, 1, 1, 2]))):
        samples[index] = _changed(rng, samples[index])
    return tuple(samples)


def any_frame(rng: random.Random) -> bytes:
    """The frame of a plain group, whose body was changed and whose length and checksum were made to fit."""
    prompts = [np.array(rng.choices(range(9), k=rng.randint(1, 4)), np.int32) for _ in range(2)]
    body = encode_samples([_sample(rng, prompts, {}) for _ in range(rng.randint(1, 3))])[PREFIX.size :]
    if rng.random() < 0.1:
        return frame_with(_sealed(body), rng.choice(["prompts", "samples", "segments", "references"]), _odd_json(rng))
    for _ in range(rng.choice([0, 1, 1, 2])):
        body = _with_odd_number(rng, body)
    if rng.random() < 0.3:
        body = mutate_bytes(rng, body)
    return _sealed(body)


def _odd_json(rng: random.Random) -> Any:
    return rng.choice([None, True, 0, -1, 1.5, "", "abcde", [], {}, {"0": {}}, [[]], [0, 0, 1, False, []]])


def frame_with(frame: bytes, part: str, value: Any) -> bytes:
    """The frame with another value of a part of its layout; its length and checksum fit."""
    body = frame[PREFIX.size :]
    begin = _HEADER_LENGTH.size + _HEADER_LENGTH.unpack_from(body)[0]
    header, data = orjson.loads(body[_HEADER_LENGTH.size : begin]), body[begin:]
    first, last = header["layout"]["data_offsets"]
    text = orjson.dumps({**orjson.loads(data[first:last]), part: value})
    grown = len(text) - (last - first)
    header["layout"] = {"dtype": "U8", "shape": [len(text)], "data_offsets": [first, last + grown]}
    header["details"]["data_offsets"] = [end + grown for end in header["details"]["data_offsets"]]
    encoded = orjson.dumps(header)
    return _sealed(_HEADER_LENGTH.pack(len(encoded)) + encoded + data[:first] + text + data[last:])


def _sealed(body: bytes) -> bytes:
    """A frame with this body."""
    return PREFIX.pack(MAGIC, FRAME_VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body


def _with_odd_number(rng: random.Random, body: bytes) -> bytes:
    """The body with another number of the same length in its layout."""
    layout = body.find(b'"segments"')
    numbers = [found for found in re.finditer(rb"\d+|false", body[layout:]) if found.start() < 200]
    chosen = rng.choice(numbers)
    size = len(chosen.group())
    odd = rng.choice([b"-1", b"0", b"9", b"99", b"[]", b"1.5", b"null", b"true", b"false"]).ljust(size)[: max(size, 1)]
    at = layout + chosen.start()
    return body[:at] + odd + body[at + size :]


def _sample(rng: random.Random, prompts: list[Any], sampling: dict[str, Any]) -> Sample:
    return Sample(
        tuple(_segment(rng, rng.choice(prompts)) for _ in range(rng.choice([1, 1, 1, 2, 3]))),
        SampleStatus.COMPLETED,
        rng.choice([None, *FinishReason]),
        rng.choice([0.0, 1.0, -0.25, 1e-9, 3e38, 1 / 3]),
        reward_parts=rng.choice([{}, {}, {"format": 0.5}]),
        text=rng.choice(["", "", 'a "quoted" answer\n', "ünïcödé"]),
        sampling=rng.choice([sampling, dict(sampling), {}, {"temperature": None, "seed": rng.randint(0, 9)}]),
        extra=rng.choice([{}, {}, {"turns": 2, "judged_reward": 0.5}]),
        session_id=rng.choice([None, None, "session"]),
        tools=rng.choice([(), (), ({"type": "function"},)]),
    )


def _segment(rng: random.Random, prompt: Any) -> Segment:
    counts = rng.choices(range(1, 6), k=rng.choice([1, 1, 2, 3]))
    tokens = sum(counts)
    return Segment(
        rng.choice([prompt, prompt.copy()]),
        np.array(rng.choices(range(200_000), k=tokens), np.int32),
        -np.array([rng.random() for _ in range(tokens)], np.float32),
        tuple(VersionSpan(rng.randint(0, 2), rng.randint(0, 9), count) for count in counts),
    )


def _changed(rng: random.Random, sample: Sample) -> Sample:
    if rng.random() < 0.5 or not sample.segments:
        name = rng.choice([
            "segments", "status", "finish_reason", "reward", "reward_parts", "text", "error", "sampling", "extra",
            "session_id", "tools", "tool_choice", "failure",
        ])  # fmt: skip
        odd = [
            *ODD_VALUES,
            *SampleStatus,
            *FinishReason,
            *FailureKind,
            {"temperature": rng.choice(ODD_VALUES)},
            EMPTY_SAMPLE,
        ]
        return replace(sample, **{name: copy.copy(rng.choice(odd))})
    segments = list(sample.segments)
    index = rng.randrange(len(segments))
    segments[index] = _changed_segment(rng, segments[index])
    return replace(sample, segments=tuple(segments))


def _changed_segment(rng: random.Random, segment: Segment) -> Segment:
    name = rng.choice(["prompt_ids", "response_ids", "logprobs", "versions", "loss_mask", "arrays", "both"])
    tokens = len(segment.response_ids)
    match name:
        case "versions":
            return replace(segment, versions=rng.choice(ODD_SPANS)(tokens))
        case "loss_mask":
            return replace(segment, loss_mask=np.array(rng.choices([True, False], k=tokens), np.bool_))
        case "arrays":
            arrays: Any = rng.choice([{"labels": np.zeros(tokens, np.int64)}, {"a": np.zeros(2)}, {"a": "text"}])
            return replace(segment, arrays=arrays)
        case "both":
            change = rng.choice(ODD_ARRAYS)
            return replace(segment, response_ids=change(segment.response_ids), logprobs=change(segment.logprobs))
        case _:
            return replace(segment, **{name: rng.choice(ODD_ARRAYS)(getattr(segment, name))})


@contextmanager
def python_alone() -> Iterator[None]:
    """Without the compiled codec."""
    passes, compiled.passes = compiled.passes, None
    try:
        yield
    finally:
        compiled.passes = passes


def put_arguments(group: Group) -> list[Any]:
    """What a put of the group would send, or the error that it would raise."""
    lease = Lease("math", 1, 1, "nonce", 1, Prompt("x"), (EMPTY_SAMPLE,) * len(group), 1, evaluation=len(group) == 2)
    rules = TaskRules(
        batch_groups=1, group_size=len(group), max_staleness=4, max_token_staleness=len(group) % 3, pass_reward=0.5
    )
    floors = Floors(((1, 3),)) if len(group) % 2 else Floors()
    try:
        encoded = encode_result(GroupResult(lease, group, generate_s=0.5))
        frames = {field: bytes(frame) for field, frame in encoded.frames.items()}
        return result_args(encoded, frames, 2, floors, rules, size_bytes=sum(map(len, frames.values())))
    except Exception as error:  # noqa: BLE001 - whatever the Python code raises, the compiled one must too
        return [type(error), str(error)]


def check_same_arguments(group: Group) -> None:
    """Raise `AssertionError` unless the compiled codec and the Python code would send the same."""
    with python_alone():
        expected = put_arguments(group)
    sent = put_arguments(group)
    assert repr(sent) == repr(expected), f"{sent!r} instead of {expected!r}"


def check_same_samples(frame: bytes) -> None:
    """Raise `AssertionError` unless both read the same of a frame, or `CorruptFrame` if neither can read it."""
    with python_alone():
        expected = _read(frame)
    assert repr(_read(frame)) == repr(expected), "the compiled codec reads something else"
    if isinstance(expected, CorruptFrame):
        raise expected


def _read(frame: bytes) -> Samples | CorruptFrame | tuple[Sample, ...]:
    try:
        return tuple(decode_samples(frame))
    except CorruptFrame as error:
        return error
