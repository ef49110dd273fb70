"""Samples as one frame of bytes: those of a whole group, or a single one.

A frame is a prefix and a safetensors blob; `safetensors.numpy.load(frame[PREFIX.size:])` reads it.

    prefix         24 bytes, little endian: magic, version of this layout, length and xxh3_64 of all that follows
    header         8 bytes of length, then JSON: tensor name -> dtype, shape, offsets; padded to 8 bytes
    prompts        int32    the different prompts, one after the other
    ids            int32    the response ids of every segment, one after the other
    logprobs       float32  of every response id
    loss_mask      bool     of every response id; absent when no segment has a mask
    s<i>/<name>    any      the named arrays of segment i, counted over all samples
    layout         uint8    JSON: what training needs besides arrays; lengths, version spans, rewards, references
    details        uint8    JSON: all else, by field; what all samples have in common is written once

Larger items come first, so that every array of a frame is aligned and decodes as a view. Invariant: whatever bytes
arrive, `decode_samples` returns samples or raises `CorruptFrame`. `Sample` objects are made when they are asked for.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from rollq.buffer.common import exact_json
from rollq.buffer.errors import CorruptFrame, InvalidGroup
from rollq.buffer.values.rollouts import ArrayRef, FinishReason, Int32Array, Sample, SampleStatus, Segment
from rollq.buffer.values.sample_columns import Samples
from rollq.buffer.wire.blob import DTYPES, check_vectors, decode_spans, view_tensor
from rollq.buffer.wire.joined_frame import Pieces

MAGIC = b"RQSF"
FRAME_VERSION = 2
PREFIX = struct.Struct("<4sIQQ")
MAX_FRAME_BYTES = 512 << 20
"""Redis keeps no longer string."""

_HEADER_LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct(PREFIX.format + "Q")
_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
_INT32, _FLOAT32, _BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)
_STATUSES = {status.value: status for status in SampleStatus}
_REASONS: dict[str | None, FinishReason | None] = {None: None, **{reason.value: reason for reason in FinishReason}}
_DETAILS: Mapping[str, tuple[type, ...]] = {
    "reward_parts": (dict,),
    "text": (str,),
    "error": (str, NoneType),
    "sampling": (dict,),
    "extra": (dict,),
    "session_id": (str, NoneType),
    "tools": (list, tuple),
    "tool_choice": (str, dict, NoneType),
}
"""Fields of a sample that only its object has, and the types of their values."""

_Tensor = tuple[str, str, list[int], int, list[Any]]
"""Name, safetensors dtype, shape, bytes, and the buffers that make up its data."""


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """Return the frame of samples whose form is right (see `check_form`).

    `sampling` and `extra` are kept as JSON: tuples come back as lists, numpy scalars as numbers, NaN as None.
    Raises `InvalidGroup`, naming sample and field, for what a frame cannot hold: an array of a dtype that safetensors
    lacks, or a value that is not JSON.
    """
    length, parts = _encode(samples)
    frame = b"".join(parts)  # the only copy
    _check_length(frame, length)
    return frame


def encode_in_pieces(samples: Sequence[Sample]) -> Pieces:
    """Like `encode_samples`, without a copy of the arrays."""
    length, parts = _encode(samples)
    frame = Pieces(parts)
    _check_length(frame, length)
    return frame


def _check_length(frame: bytes | Pieces, length: int) -> None:
    if len(frame) != length:
        raise InvalidGroup("arrays of a segment disagree in length or dtype: check_group says where")


def _encode(samples: Sequence[Sample]) -> tuple[int, list[Any]]:
    """The length that a frame must have, and its parts."""
    fields, prompts = Samples.of(samples), _Prompts()
    owned = [(owner, segment) for owner, segments in enumerate(fields.segments) for segment in segments]
    segments = [segment for _, segment in owned]
    rows = [(owner, prompts.add(segment.prompt_ids), *_layout_of(segment)) for owner, segment in owned]
    tokens = sum([row[2] for row in rows])
    tensors: list[_Tensor] = [
        ("prompts", "I32", [prompts.tokens], 4 * prompts.tokens, [*prompts.found]),
        ("ids", "I32", [tokens], 4 * tokens, [one.response_ids for one in segments]),
        ("logprobs", "F32", [tokens], 4 * tokens, [one.logprobs for one in segments]),
    ]
    if any(row[3] for row in rows):
        tensors.append(("loss_mask", "BOOL", [tokens], tokens, list(map(_mask, segments))))
    for name, text in (("layout", _encode_layout(fields, prompts, rows)), ("details", _encode_details(samples))):
        tensors.append((name, "U8", [len(text)], len(text), [text]))
    if any(one.arrays for one in segments):
        tensors += _named_arrays(fields)
        tensors.sort(key=lambda tensor: -DTYPES[tensor[1]].itemsize)
    return _pack(tensors)


class _Prompts:
    """The different prompts among those that are added, and their tokens in all."""

    def __init__(self) -> None:
        self.found: list[Int32Array] = []
        self.tokens = 0
        self._by_object: dict[int, int] = {}  # all arrays stay alive meanwhile
        self._by_content: dict[tuple[int, int], int] = {}

    def add(self, ids: Int32Array) -> int:
        """The index of the prompt among those found."""
        index = self._by_object.get(id(ids))
        if index is None:
            content = np.ascontiguousarray(ids)
            key = len(ids), xxhash.xxh3_64_intdigest(content.data)
            index = self._by_content.setdefault(key, len(self.found))
            if index == len(self.found) or not np.array_equal(self.found[index], content):
                index = len(self.found)
                self.found.append(content)
                self.tokens += len(content)
            self._by_object[id(ids)] = index
        return index


def _mask(segment: Segment) -> Any:
    """A segment without a mask beside one that has one: all True, so that the tensor covers every response id."""
    return b"\1" * len(segment.response_ids) if segment.loss_mask is None else segment.loss_mask


def decode_samples(frame: bytes) -> Samples:
    """Return the samples of a frame. Their arrays are read-only views of `frame`.

    Raises `CorruptFrame` for anything but a whole and unchanged frame of a known version.
    """
    data_at = _check_prefix(frame)
    try:
        header = orjson.loads(frame[_HEAD.size : data_at])
        layout = orjson.loads(_text(frame, data_at, header.pop("layout")))
        details = exact_json.loads(_text(frame, data_at, header.pop("details")))
        return _decode(frame, data_at, header, layout, details)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptFrame(
            f"frame of {len(frame)} bytes: the checksum is right, but the content is not samples: "
            f"{type(error).__name__}: {error}"
        ) from error


def decode_sample(frame: bytes) -> Sample:
    """Return the sample of a frame that holds one. Raises `CorruptFrame` as `decode_samples` does."""
    samples = decode_samples(frame)
    if len(samples) != 1:
        raise CorruptFrame(f"frame of {len(frame)} bytes holds {len(samples)} samples, not one")
    return samples[0]


def _encode_layout(fields: Samples, prompts: _Prompts, rows: Sequence[Any]) -> bytes:
    segments = [segment for segments in fields.segments for segment in segments]
    layout = {
        "prompts": list(map(len, prompts.found)),
        "samples": (fields.statuses, fields.rewards, fields.reasons, fields.temperatures),
        "segments": rows,
        "references": {
            str(index): found
            for index, segment in enumerate(segments)
            if segment.arrays and (found := _references(segment))
        },
    }
    try:
        return orjson.dumps(layout)
    except TypeError as error:
        raise InvalidGroup(f"versions or references of arrays cannot be written as JSON: {error}") from None


def _layout_of(segment: Segment) -> tuple[int, bool, list[tuple[int, ...]]]:
    """Response tokens, whether there is a mask, and version spans."""
    return len(segment.response_ids), segment.loss_mask is not None, list(map(tuple, segment.versions))


def _references(segment: Segment) -> dict[str, tuple[str, str, tuple[int, ...], str]]:
    """The segment's arrays that live beside Redis: name -> the fields of its reference."""
    return {
        name: (array.uri, array.sha256, array.shape, array.dtype)
        for name, array in segment.arrays.items()
        if isinstance(array, ArrayRef)
    }


def _encode_details(samples: Sequence[Sample]) -> bytes:
    """The other fields: `shared` ones have one value for all samples, those of `each` a list."""
    shared, each = dict[str, orjson.Fragment](), dict[str, list[orjson.Fragment]]()
    for name in _DETAILS:
        values = [getattr(sample, name) for sample in samples]
        looked_at = values[:1] if all(value is values[0] for value in values) else values
        texts = [_to_json(samples, index, name, value) for index, value in enumerate(looked_at)]
        if len(set(texts)) == 1:
            shared[name] = orjson.Fragment(texts[0])
        else:
            each[name] = list(map(orjson.Fragment, texts))
    return orjson.dumps({"shared": shared, "each": each})


def check_details(sample: Sample) -> None:
    """Raise `InvalidGroup`, naming the field, for one that cannot be written as JSON."""
    for name in _DETAILS:
        _to_json([sample], 0, name, getattr(sample, name))


def _to_json(samples: Sequence[Sample], index: int, name: str, value: Any) -> bytes:
    if name == "reward_parts" and isinstance(value, Mapping):
        value = {key: float(part) for key, part in value.items()}
    if not isinstance(value, _DETAILS[name]):
        needed = " or ".join(one.__name__ for one in _DETAILS[name])
        raise InvalidGroup(f"{_place(samples, index)}{name} is {value!r}, {needed} is needed")
    try:
        return exact_json.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise InvalidGroup(f"{_place(samples, index)}{name} cannot be written as JSON: {error}") from None


def _place(samples: Sequence[Sample], index: int) -> str:
    return f"sample {index}: " if len(samples) > 1 else ""


def _named_arrays(fields: Samples) -> list[_Tensor]:
    tensors: list[_Tensor] = []
    number = 0
    for owner, segments in enumerate(fields.segments):
        for place, segment in enumerate(segments):
            for name, array in segment.arrays.items():
                if isinstance(array, ArrayRef):
                    continue
                tag = _TAGS.get(array.dtype) if isinstance(array, np.ndarray) else None
                if tag is None:
                    found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                    raise InvalidGroup(
                        f"{_place(fields, owner)}segments[{place}].arrays[{name!r}] is {found}; a numpy array of a "
                        f"little-endian dtype among {', '.join(_TAGS.values())} is needed"
                    )
                tensors.append((f"s{number}/{name}", tag, list(array.shape), array.nbytes, [array]))
            number += 1
    return tensors


def _pack(tensors: list[_Tensor]) -> tuple[int, list[Any]]:
    header = {}
    buffers = []
    offset = 0
    for name, tag, shape, size_bytes, data in tensors:
        end = offset + size_bytes
        header[name] = {"dtype": tag, "shape": shape, "data_offsets": (offset, end)}
        buffers += data
        offset = end
    try:
        encoded = orjson.dumps(header)
    except TypeError as error:
        raise InvalidGroup(f"the name of an array cannot be written as JSON: {error}") from None
    encoded += b" " * (-len(encoded) % 8)
    length = _HEADER_LENGTH.size + len(encoded) + offset
    if length > MAX_FRAME_BYTES - PREFIX.size:
        raise InvalidGroup(f"a frame of {length} bytes exceeds the {MAX_FRAME_BYTES} bytes of a Redis string")
    parts: list[Any] = [_HEADER_LENGTH.pack(len(encoded)), encoded, *buffers]
    checksum = xxhash.xxh3_64()
    for index, part in enumerate(parts):
        if isinstance(part, np.ndarray):
            part = parts[index] = np.ascontiguousarray(part)
        checksum.update(part)
    return PREFIX.size + length, [PREFIX.pack(MAGIC, FRAME_VERSION, length, checksum.intdigest()), *parts]


def _check_prefix(frame: bytes) -> int:
    """Return the byte at which the arrays of an intact frame begin."""
    size = len(frame)
    if size < _HEAD.size:
        raise CorruptFrame(f"frame of {size} bytes is truncated: its first fields alone take {_HEAD.size}")
    magic, version, length, checksum, header_length = _HEAD.unpack_from(frame)
    if magic != MAGIC:
        raise CorruptFrame(f"frame of {size} bytes begins with {magic!r}, not with {MAGIC!r}: it is not rollq's")
    if version != FRAME_VERSION:
        raise CorruptFrame(
            f"frame of {size} bytes has schema version {version}, this rollq reads {FRAME_VERSION}: "
            "use the version of rollq that wrote it"
        )
    if length != size - PREFIX.size:
        raise CorruptFrame(f"frame of {size} bytes should have {length + PREFIX.size}: it was truncated or extended")
    found = xxhash.xxh3_64_intdigest(memoryview(frame)[PREFIX.size :])
    if found != checksum:
        raise CorruptFrame(f"frame of {size} bytes has xxh3_64 {found:#018x}, not {checksum:#018x}: it was changed")
    if header_length > size - _HEAD.size:
        raise CorruptFrame(f"frame of {size} bytes claims a header of {header_length} bytes at byte {_HEAD.size}")
    return _HEAD.size + int(header_length)


def _decode(
    frame: bytes, data_at: int, header: dict[str, Any], layout: Mapping[str, Any], details: Mapping[str, Any]
) -> Samples:
    """Return the samples. `header` describes the tensors but the texts, which are `layout` and `details`."""
    view = partial(view_tensor, frame, data_at)
    prompts = _split(view(header.pop("prompts")), layout["prompts"])
    ids, logprobs = view(header.pop("ids")), view(header.pop("logprobs"))
    mask: Any = view(header.pop("loss_mask")) if "loss_mask" in header else None
    check_vectors([ids, *prompts], logprobs, mask)
    rows = layout["segments"]
    arrays: list[dict[str, npt.NDArray[Any] | ArrayRef]] = [{} for _ in rows]
    for index, references in layout["references"].items():
        arrays[_index(int(index), rows)].update(_decode_references(references))
    for key, entry in header.items():
        owner, _, name = key.partition("/")
        arrays[_index(int(owner[1:]), rows)][name] = view(entry)
    statuses, rewards, reasons, temperatures = layout["samples"]
    if {len(rewards), len(reasons), len(temperatures)} != {len(statuses)}:
        raise ValueError(f"{len(statuses)} samples, {len(rewards)} rewards")
    segments: list[list[Segment]] = [[] for _ in statuses]
    start = 0
    for (sample, prompt, tokens, masked, spans), named in zip(rows, arrays, strict=True):
        end = start + tokens
        segments[_index(sample, statuses)].append(
            Segment(
                prompts[_index(prompt, prompts)],
                ids[start:end],
                logprobs[start:end],
                decode_spans(spans, tokens),
                mask[start:end] if masked else None,
                named,
            )
        )
        start = end
    if start != len(ids) or start != len(logprobs) or (mask is not None and start != len(mask)):
        raise ValueError(f"segments have {start} tokens, arrays {len(ids)} ids and {len(logprobs)} logprobs")
    return Samples(
        tuple([_STATUSES[status] for status in statuses]),
        tuple([None if reward is None else _number(reward) for reward in rewards]),
        tuple([_REASONS[reason] for reason in reasons]),
        tuple(map(_number, temperatures)),
        tuple(map(tuple, segments)),
        partial(_objects, _columns(details, len(statuses))),
    )


def _index(index: int, owners: Sequence[Any]) -> int:
    """`index`, which must be one of `owners`: numpy and lists would take a negative one."""
    if not 0 <= index < len(owners):
        raise ValueError(f"{index} is none of {len(owners)}")
    return index


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _columns(details: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    """The values of each field of `details`, one per sample. Raises `ValueError` for one of another type."""
    shared, each = details["shared"], details["each"]
    columns = {name: [shared[name]] * count if name in shared else list(each[name]) for name in _DETAILS}
    for name, types in _DETAILS.items():
        if len(columns[name]) != count or not all(isinstance(value, types) for value in columns[name]):
            raise ValueError(f"{name} of {count} samples is {columns[name]!r}")
    return columns


def _objects(columns: Mapping[str, list[Any]], samples: Samples) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            samples.segments[i],
            samples.statuses[i],
            samples.reasons[i],
            samples.rewards[i],
            dict(columns["reward_parts"][i]),  # siblings may share it
            columns["text"][i],
            columns["error"][i],
            dict(columns["sampling"][i]),
            dict(columns["extra"][i]),
            columns["session_id"][i],
            tuple(columns["tools"][i]),
            columns["tool_choice"][i],
        )
        for i in range(len(samples))
    )


def _split(flat: Int32Array, lengths: Sequence[int]) -> list[Int32Array]:
    """The arrays that `flat` consists of. Raises `ValueError` unless their lengths add up."""
    found, start = [], 0
    for length in lengths:
        if not 0 <= length <= len(flat) - start:
            raise ValueError(f"a length of {length} in {len(flat)} ids")
        found.append(flat[start : start + length])
        start += length
    if start != len(flat):
        raise ValueError(f"lengths add up to {start} of {len(flat)} ids")
    return found


def _text(frame: bytes, data_at: int, entry: Mapping[str, Any]) -> bytes:
    begin, end = entry["data_offsets"]
    return frame[data_at + begin : data_at + end]


def _decode_references(found: Mapping[str, Any]) -> dict[str, ArrayRef]:
    return {name: ArrayRef(uri, sha256, tuple(shape), dtype) for name, (uri, sha256, shape, dtype) in found.items()}
