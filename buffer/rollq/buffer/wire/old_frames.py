"""Frames of one sample each, as rollq 0.x wrote them: in snapshots and in buffers that are older than this one.

A frame is a prefix and a safetensors blob:

    prefix         16 bytes, little endian: magic, version of this layout, length and CRC-32 of all that follows
    header         8 bytes of length, then JSON: tensor name -> dtype, shape, offsets; padded to 8 bytes
    ids            int32    prompt and response ids of every segment, one after the other
    logprobs       float32  of every response id
    loss_mask      bool     of every response id; absent when no segment has a mask
    s<i>/<name>    any      the named arrays of segment i
    meta           uint8    JSON: lengths, version spans and array references of segments, and all else of the sample

Larger items come first, so that every array of a frame is aligned and decodes as a view. Invariant: whatever bytes
arrive, `decode_old_frame` returns a sample or raises `CorruptFrame`.
"""

import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import orjson

from rollq.buffer.errors import CorruptFrame
from rollq.buffer.values.rollouts import ArrayRef, FinishReason, Sample, SampleStatus, Segment
from rollq.buffer.wire.blob import check_vectors, decode_spans, view_tensor

MAGIC = b"RQSF"
OLD_VERSION = 1
_PREFIX = struct.Struct("<4sIII")

_HEAD = struct.Struct(_PREFIX.format + "Q")
_STATUSES = {status.value: status for status in SampleStatus}
_REASONS: dict[str | None, FinishReason | None] = {None: None, **{reason.value: reason for reason in FinishReason}}


def decode_old_frame(frame: bytes) -> Sample:
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


def _check_prefix(frame: bytes) -> int:
    """Return the byte at which the arrays of an intact frame begin."""
    size = len(frame)
    if size < _HEAD.size:
        raise CorruptFrame(f"frame of {size} bytes is truncated: its first fields alone take {_HEAD.size}")
    magic, version, length, checksum, header_length = _HEAD.unpack_from(frame)
    if magic != MAGIC:
        raise CorruptFrame(f"frame of {size} bytes begins with {magic!r}, not with {MAGIC!r}: it is not rollq's")
    if version != OLD_VERSION:
        raise CorruptFrame(
            f"frame of {size} bytes has schema version {version}, this rollq reads {OLD_VERSION}: "
            "use the version of rollq that wrote it"
        )
    if length != size - _PREFIX.size:
        raise CorruptFrame(f"frame of {size} bytes should have {length + _PREFIX.size}: it was truncated or extended")
    found = zlib.crc32(memoryview(frame)[_PREFIX.size :])
    if found != checksum:
        raise CorruptFrame(f"frame of {size} bytes has CRC-32 {found:#010x}, not {checksum:#010x}: it was changed")
    if header_length > size - _HEAD.size:
        raise CorruptFrame(f"frame of {size} bytes claims a header of {header_length} bytes at byte {_HEAD.size}")
    return _HEAD.size + int(header_length)


def _decode_references(found: Mapping[str, Any]) -> dict[str, npt.NDArray[Any] | ArrayRef]:
    return {name: ArrayRef(uri, sha256, tuple(shape), dtype) for name, (uri, sha256, shape, dtype) in found.items()}


def _decode_segments(frame: bytes, data_at: int, header: dict[str, Any], layout: list[Any]) -> tuple[Segment, ...]:
    """Return the segments. `header` describes the tensors but `meta`; `layout` is what an older rollq wrote."""
    ids, logprobs = view_tensor(frame, data_at, header.pop("ids")), view_tensor(frame, data_at, header.pop("logprobs"))
    mask: Any = view_tensor(frame, data_at, header.pop("loss_mask")) if "loss_mask" in header else None
    check_vectors([ids], logprobs, mask)
    arrays: list[dict[str, npt.NDArray[Any] | ArrayRef]] = [_decode_references(row[4]) for row in layout]
    for key, entry in header.items():
        owner, _, name = key.partition("/")
        arrays[int(owner[1:])][name] = view_tensor(frame, data_at, entry)
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
                decode_spans(spans, response_length),
                mask[token_at:tokens_end] if masked else None,
                arrays[index],
            )
        )
        id_at, token_at = ids_end, tokens_end
    if id_at != len(ids) or token_at != len(logprobs) or (mask is not None and token_at != len(mask)):
        raise ValueError(f"lengths add up to {id_at} ids and {token_at} logprobs of {len(ids)} and {len(logprobs)}")
    return tuple(segments)
