"""One sample as one frame of bytes, and one prompt as JSON: what Redis stores of them.

A frame is a prefix and a safetensors blob; `safetensors.numpy.load(frame[PREFIX.size:])` reads it.

    prefix         16 bytes, little endian: magic, version of this layout, length and CRC-32 of all that follows
    header         8 bytes of length, then JSON: tensor name -> dtype, shape, offsets; padded to 8 bytes
    ids            int32    prompt and response ids of every segment, one after the other
    logprobs       float32  of every response id
    loss_mask      bool     of every response id; absent when no segment has a mask
    s<i>/<name>    any      the named arrays of segment i
    meta           uint8    JSON: lengths, version spans and array references of segments, and all else of the sample

Larger items come first, so that every array of a frame is aligned and decodes as a view. Invariant: whatever bytes
arrive, `decode_sample` returns a sample or raises `CorruptFrame`.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from rollq.buffer.errors import CorruptFrame, InvalidGroup
from rollq.buffer.rollouts import ArrayRef, FinishReason, Sample, SampleStatus, Segment, VersionSpan
from rollq.buffer.wire.validation import check_group

MAGIC = b"RQSF"
FRAME_VERSION = 1
PREFIX = struct.Struct("<4sIII")
MAX_FRAME_BYTES = 512 << 20
"""Redis keeps no longer string."""

_HEADER_LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct(PREFIX.format + "Q")
_DTYPES = {
    tag: np.dtype(code)
    for tag, code in {
        "F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "BOOL": "?",
        "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
        "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
    }.items()
}  # fmt: skip
_TAGS = {dtype: tag for tag, dtype in _DTYPES.items()}
_STATUSES = {status.value: status for status in SampleStatus}
_REASONS: dict[str | None, FinishReason | None] = {None: None, **{reason.value: reason for reason in FinishReason}}

_Tensor = tuple[str, str, list[int], int, list[Any]]
"""Name, safetensors dtype, shape, bytes, and the buffers that make up its data."""


def encode_group(
    samples: Sequence[Sample], *, group_size: int, vocab_size: int | None = None, max_bytes: int | None = None
) -> list[bytes]:
    """Check a group (see `check_group`) and return one frame per sample.

    Raises `InvalidGroup` also when the frames together exceed `max_bytes`.
    """
    check_group(samples, group_size=group_size, vocab_size=vocab_size)
    frames = []
    for index, sample in enumerate(samples):
        try:
            frames.append(encode_sample(sample))
        except InvalidGroup as error:
            raise InvalidGroup(f"sample {index}: {error}") from error
    total_bytes = sum(map(len, frames))
    if max_bytes is not None and total_bytes > max_bytes:
        raise InvalidGroup(f"the group takes {total_bytes} bytes encoded, more than the limit of {max_bytes} bytes")
    return frames


def encode_sample(sample: Sample) -> bytes:
    """Return the frame of a sample that passed `check_group`.

    `sampling` and `extra` are kept as JSON: tuples come back as lists, numpy scalars as numbers, NaN as None.
    Raises `InvalidGroup`, naming the field, for what a frame cannot hold: an array of a dtype that safetensors
    lacks, or a value that is not JSON.
    """
    ids: list[Any] = []
    logprobs: list[Any] = []
    layout = []
    id_count = response_count = 0
    masked = named = False
    for segment in sample.segments:
        prompt, response, mask = segment.prompt_ids, segment.response_ids, segment.loss_mask
        ids += (prompt, response)
        logprobs.append(segment.logprobs)
        references = _references(segment) if segment.arrays else {}
        spans = [tuple(span) for span in segment.versions]
        layout.append((len(prompt), len(response), spans, mask is not None, references))
        id_count += len(prompt) + len(response)
        response_count += len(response)
        masked = masked or mask is not None
        named = named or bool(segment.arrays)
    tensors: list[_Tensor] = [
        ("ids", "I32", [id_count], 4 * id_count, ids),
        ("logprobs", "F32", [response_count], 4 * response_count, logprobs),
    ]
    if masked:
        tensors.append(("loss_mask", "BOOL", [response_count], response_count, [_mask(s) for s in sample.segments]))
    meta = _encode_meta(sample, layout)
    tensors.append(("meta", "U8", [len(meta)], len(meta), [meta]))
    if named:
        tensors += _named_arrays(sample.segments)
        tensors.sort(key=lambda tensor: -_DTYPES[tensor[1]].itemsize)
    return _pack(tensors)


def decode_sample(frame: bytes) -> Sample:
    """Return the sample of a frame. Its arrays are read-only views of `frame`.

    Raises `CorruptFrame` for anything but a whole and unchanged frame of a known version.
    """
    data_at = _check_prefix(frame)
    try:
        header = orjson.loads(frame[_HEAD.size : data_at])
        begin, end = header.pop("meta")["data_offsets"]
        meta = orjson.loads(frame[data_at + begin : data_at + end])
        return Sample(
            _decode_segments(frame, data_at, header, meta["segments"]),
            _STATUSES[meta["status"]],
            _REASONS[meta["finish_reason"]],
            meta["reward"],
            meta["reward_parts"],
            meta["text"],
            meta["error"],
            meta["sampling"],
            meta["extra"],
            meta["session_id"],
            tuple(meta["tools"]),
            meta["tool_choice"],
        )
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptFrame(
            f"frame of {len(frame)} bytes: the checksum is right, but the content is not a sample: "
            f"{type(error).__name__}: {error}"
        ) from error


def _mask(segment: Segment) -> Any:
    """A segment without a mask beside one that has one: all True, so that the tensor covers every response id."""
    return b"\1" * len(segment.response_ids) if segment.loss_mask is None else segment.loss_mask


def _encode_meta(sample: Sample, layout: list[Any]) -> bytes:
    meta = {
        "segments": layout,
        "status": sample.status,
        "finish_reason": sample.finish_reason,
        "reward": None if sample.reward is None else float(sample.reward),
        "reward_parts": {name: float(part) for name, part in sample.reward_parts.items()},
        "text": sample.text,
        "error": sample.error,
        "sampling": sample.sampling,
        "extra": sample.extra,
        "session_id": sample.session_id,
        "tools": sample.tools,
        "tool_choice": sample.tool_choice,
    }
    try:
        return orjson.dumps(meta, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        raise InvalidGroup(_not_json(meta)) from None


def _not_json(fields: Mapping[str, Any]) -> str:
    """Say which field orjson cannot write, and why."""
    for name, value in fields.items():
        try:
            orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            return f"{name} cannot be written as JSON: {error}"
    raise AssertionError("each field alone is JSON, so all together are")


def _references(segment: Segment) -> dict[str, tuple[str, str, tuple[int, ...], str]]:
    """The segment's arrays that live beside Redis: name -> the fields of its reference."""
    return {
        name: (array.uri, array.sha256, array.shape, array.dtype)
        for name, array in segment.arrays.items()
        if isinstance(array, ArrayRef)
    }


def _named_arrays(segments: Sequence[Segment]) -> list[_Tensor]:
    tensors: list[_Tensor] = []
    for index, segment in enumerate(segments):
        for name, array in segment.arrays.items():
            if isinstance(array, ArrayRef):
                continue
            tag = _TAGS.get(array.dtype) if isinstance(array, np.ndarray) else None
            if tag is None:
                found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                raise InvalidGroup(
                    f"segments[{index}].arrays[{name!r}] is {found}; a numpy array of a little-endian "
                    f"dtype among {', '.join(_TAGS.values())} is needed"
                )
            tensors.append((f"s{index}/{name}", tag, list(array.shape), array.nbytes, [array]))
    return tensors


def _pack(tensors: list[_Tensor]) -> bytes:
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
    parts: list[Any] = [_HEADER_LENGTH.pack(len(encoded)), encoded, *buffers]
    try:
        body = b"".join(parts)
    except TypeError:  # an array that is not contiguous: rare, so looked for only now
        parts = [np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part for part in parts]
        body = b"".join(parts)
    if len(body) != _HEADER_LENGTH.size + len(encoded) + offset:
        raise InvalidGroup("arrays of a segment disagree in length or dtype: check_group says where")
    if len(body) > MAX_FRAME_BYTES - PREFIX.size:
        raise InvalidGroup(f"a frame of {len(body)} bytes exceeds the {MAX_FRAME_BYTES} bytes of a Redis string")
    return PREFIX.pack(MAGIC, FRAME_VERSION, len(body), zlib.crc32(body)) + body


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
    found = zlib.crc32(memoryview(frame)[PREFIX.size :])
    if found != checksum:
        raise CorruptFrame(f"frame of {size} bytes has CRC-32 {found:#010x}, not {checksum:#010x}: it was changed")
    if header_length > size - _HEAD.size:
        raise CorruptFrame(f"frame of {size} bytes claims a header of {header_length} bytes at byte {_HEAD.size}")
    return _HEAD.size + int(header_length)


def _view(frame: bytes, data_at: int, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Return one tensor of the blob whose data begins at byte `data_at`."""
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(frame):  # numpy itself does not refuse a negative offset
        raise ValueError(f"data offsets {begin} and {end}")
    array: npt.NDArray[Any] = np.ndarray(entry["shape"], _DTYPES[entry["dtype"]], frame, data_at + begin)
    if array.nbytes != end - begin:
        raise ValueError(f"data offsets {begin} and {end} for {array.nbytes} bytes")
    return array


def _decode_references(found: Mapping[str, Any]) -> dict[str, npt.NDArray[Any] | ArrayRef]:
    return {name: ArrayRef(uri, sha256, tuple(shape), dtype) for name, (uri, sha256, shape, dtype) in found.items()}


def _decode_segments(frame: bytes, data_at: int, header: dict[str, Any], layout: list[Any]) -> tuple[Segment, ...]:
    """Return the segments. `header` describes the tensors but `meta`; `layout` is what `encode_sample` wrote."""
    ids, logprobs = _view(frame, data_at, header.pop("ids")), _view(frame, data_at, header.pop("logprobs"))
    mask: Any = _view(frame, data_at, header.pop("loss_mask")) if "loss_mask" in header else None
    arrays: list[dict[str, npt.NDArray[Any] | ArrayRef]] = [_decode_references(row[4]) for row in layout]
    for key, entry in header.items():
        owner, _, name = key.partition("/")
        arrays[int(owner[1:])][name] = _view(frame, data_at, entry)
    segments = []
    id_at = token_at = 0
    for index, (prompt_length, response_length, spans, masked, _) in enumerate(layout):
        response_at = id_at + prompt_length
        ids_end, tokens_end = response_at + response_length, token_at + response_length
        segments.append(
            Segment(
                ids[id_at:response_at],
                ids[response_at:ids_end],
                logprobs[token_at:tokens_end],
                tuple(map(VersionSpan._make, spans)),
                mask[token_at:tokens_end] if masked else None,
                arrays[index],
            )
        )
        id_at, token_at = ids_end, tokens_end
    if id_at != len(ids) or token_at != len(logprobs):
        raise ValueError(f"lengths add up to {id_at} ids and {token_at} logprobs of {len(ids)} and {len(logprobs)}")
    return tuple(segments)
