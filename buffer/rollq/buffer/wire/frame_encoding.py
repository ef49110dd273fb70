"""Writes samples as frames; see `rollq.buffer.wire.frame_format`."""

import struct
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import orjson
import xxhash

from rollq.buffer.common import exact_json
from rollq.buffer.errors import InvalidGroup
from rollq.buffer.values.rollouts import ArrayRef, Int32Array, Sample, Segment
from rollq.buffer.values.sample_columns import Samples
from rollq.buffer.wire.blob import DTYPES
from rollq.buffer.wire.frame_format import DETAILS, EMPTY, FRAME_VERSION, MAGIC, MAX_FRAME_BYTES, PREFIX
from rollq.buffer.wire.joined_frame import Pieces
from rollq.buffer.wire.validation import in_blocks

_HEADER_LENGTH = struct.Struct("<Q")
_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
_details_of = attrgetter(*DETAILS)
_DETAIL_OF = {name: attrgetter(name) for name in DETAILS}
Tensor = tuple[str, str, list[int], int, list[Any]]
"""Name, safetensors dtype, shape, bytes, and the buffers that make up the data."""


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """Return the frame of samples that have passed `check_group`.

    `sampling` and `extra` are kept as JSON: tuples come back as lists, numpy scalars as numbers, NaN as None. Raises
    `InvalidGroup`, naming sample and field, for a value that a frame cannot hold: an array of a dtype that safetensors
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
    """The length that the frame must have, and the frame's parts."""
    fields, prompts = Samples.of(samples), _Prompts()
    owned = [(owner, segment) for owner, segments in enumerate(fields.segments) for segment in segments]
    segments = [segment for _, segment in owned]
    rows = [(owner, prompts.add(segment.prompt_ids), *_layout_of(segment)) for owner, segment in owned]
    tokens = sum([row[2] for row in rows])
    tensors: list[Tensor] = [
        ("prompts", "I32", [prompts.tokens], 4 * prompts.tokens, in_blocks(prompts.found)),
        ("ids", "I32", [tokens], 4 * tokens, in_blocks([segment.response_ids for segment in segments])),
        ("logprobs", "F32", [tokens], 4 * tokens, in_blocks([segment.logprobs for segment in segments])),
    ]
    if any(row[3] for row in rows):
        tensors.append(("loss_mask", "BOOL", [tokens], tokens, list(map(_mask, segments))))
    for name, text in (("layout", _encode_layout(fields, prompts, rows)), ("details", encode_details(samples))):
        tensors.append((name, "U8", [len(text)], len(text), [text]))
    if any(segment.arrays for segment in segments):
        tensors += _named_arrays(fields)
        tensors.sort(key=lambda tensor: -DTYPES[tensor[1]].itemsize)
    return pack(tensors)


class _Prompts:
    """The different prompts among the added prompts, and their total number of tokens."""

    def __init__(self) -> None:
        self.found: list[Int32Array] = []
        self.tokens = 0
        self._by_object: dict[int, int] = {}  # by id(), since all arrays stay alive until the frame is made
        self._by_content: dict[tuple[int, int], int] = {}

    def add(self, ids: Int32Array) -> int:
        """Add a prompt; returns its index among the different prompts."""
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
    """A segment's mask; all True for a segment without a mask beside segments with masks, so that the tensor covers
    every response id."""
    return b"\1" * len(segment.response_ids) if segment.loss_mask is None else segment.loss_mask


def _encode_layout(fields: Samples, prompts: _Prompts, rows: Sequence[Any]) -> bytes:
    segments = [segment for segments in fields.segments for segment in segments]
    layout = {
        "prompts": list(map(len, prompts.found)),
        "samples": (fields.statuses, fields.rewards, fields.reasons, fields.temperatures),
        "segments": rows,
        "references": {
            str(index): references
            for index, segment in enumerate(segments)
            if segment.arrays and (references := _references(segment))
        },
    }
    try:
        return orjson.dumps(layout)
    except TypeError as error:
        raise InvalidGroup(f"versions or references of arrays cannot be written as JSON: {error}") from None


def _layout_of(segment: Segment) -> tuple[int, bool, list[tuple[int, ...]]]:
    """The number of response tokens, whether there is a mask, and the version spans."""
    return len(segment.response_ids), segment.loss_mask is not None, list(map(tuple, segment.versions))


def _references(segment: Segment) -> dict[str, tuple[str, str, tuple[int, ...], str]]:
    """The segment's arrays that are stored outside Redis: name -> the reference's fields."""
    return {
        name: (array.uri, array.sha256, array.shape, array.dtype)
        for name, array in segment.arrays.items()
        if isinstance(array, ArrayRef)
    }


def encode_details(samples: Sequence[Sample], empty: Sequence[bytes | None] | None = None) -> bytes:
    """Encode the other fields: a field in `shared` has one value for all samples, a field in `each` has a list. `empty`
    is the result of `empty_details`, which is called if `empty` is missing.
    """
    shared, each = dict[str, orjson.Fragment](), dict[str, list[orjson.Fragment]]()
    for name, text in zip(DETAILS, empty_details(samples) if empty is None else empty, strict=True):
        if text is None:
            values = list(map(_DETAIL_OF[name], samples))
            different = values[:1] if len(set(map(id, values))) == 1 else values
            texts = [_to_json(samples, index, name, value) for index, value in enumerate(different)]
            if len(set(texts)) != 1:
                each[name] = list(map(orjson.Fragment, texts))
                continue
            text = texts[0]
        shared[name] = orjson.Fragment(text)
    return orjson.dumps({"shared": shared, "each": each})


def empty_details(samples: Sequence[Sample]) -> list[bytes | None]:
    """For each field in `DETAILS`, the JSON of its value if all samples have an empty value of one type, else None."""
    columns = zip(*map(_details_of, samples), strict=True) if samples else [()] * len(DETAILS)
    return [_empty(name, values) for name, values in zip(DETAILS, columns, strict=True)]


def _empty(name: str, values: Sequence[Any]) -> bytes | None:
    kinds = set(map(type, values))
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    return EMPTY[kind] if kind in EMPTY and kind in DETAILS[name] and not any(values) else None


def check_details(sample: Sample, empty: Sequence[bytes | None] | None = None) -> None:
    """Raise `InvalidGroup`, naming the field, for a field that cannot be written as JSON. `empty` is as in
    `encode_details`."""
    for name, text in zip(DETAILS, empty_details([sample]) if empty is None else empty, strict=True):
        if text is None:
            _to_json([sample], 0, name, getattr(sample, name))


def _to_json(samples: Sequence[Sample], index: int, name: str, value: Any) -> bytes:
    if name == "reward_parts" and isinstance(value, Mapping):
        value = {key: float(part) for key, part in value.items()}
    if not isinstance(value, DETAILS[name]):
        needed = " or ".join(kind.__name__ for kind in DETAILS[name])
        raise InvalidGroup(f"{_place(samples, index)}{name} is {value!r}, expected {needed}")
    try:
        return exact_json.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise InvalidGroup(f"{_place(samples, index)}{name} cannot be written as JSON: {error}") from None


def _place(samples: Sequence[Sample], index: int) -> str:
    return f"sample {index}: " if len(samples) > 1 else ""


def _named_arrays(fields: Samples) -> list[Tensor]:
    tensors: list[Tensor] = []
    number = 0
    for owner, segments in enumerate(fields.segments):
        for place, segment in enumerate(segments):
            for name, array in segment.arrays.items():
                if isinstance(array, ArrayRef):
                    continue
                tag = _TAGS.get(array.dtype) if isinstance(array, np.ndarray) else None
                if tag is None:
                    kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                    raise InvalidGroup(
                        f"{_place(fields, owner)}segments[{place}].arrays[{name!r}] is {kind}; expected a numpy array "
                        f"with a little-endian dtype among {', '.join(_TAGS.values())}"
                    )
                tensors.append((f"s{number}/{name}", tag, list(array.shape), array.nbytes, [array]))
            number += 1
    return tensors


def pack(tensors: Sequence[Tensor]) -> tuple[int, list[Any]]:
    """The length that these tensors' frame must have, and the frame's parts. Raises `InvalidGroup`."""
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
