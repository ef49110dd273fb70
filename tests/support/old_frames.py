"""Frames of one sample each, as rollq wrote them before a group had one frame."""

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from rollq.buffer.values.rollouts import ArrayRef, Sample, Segment
from rollq.buffer.wire.blob import DTYPES
from rollq.buffer.wire.old_frames import MAGIC, OLD_VERSION

PREFIX = struct.Struct("<4sIII")
_HEADER_LENGTH = struct.Struct("<Q")
_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
_Tensor = tuple[str, str, list[int], int, list[Any]]


def encode_old_frame(sample: Sample) -> bytes:
    """The frame of a sample that can be encoded."""
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
        tensors.sort(key=lambda tensor: -DTYPES[tensor[1]].itemsize)
    return _pack(tensors)


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
    return orjson.dumps(meta, option=orjson.OPT_SERIALIZE_NUMPY)


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
            tensors.append((f"s{index}/{name}", _TAGS[array.dtype], list(array.shape), array.nbytes, [array]))
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
    encoded = orjson.dumps(header)
    encoded += b" " * (-len(encoded) % 8)
    parts = [np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part for part in buffers]
    return sealed_old(b"".join([_HEADER_LENGTH.pack(len(encoded)), encoded, *map(bytes, parts)]))


def sealed_old(body: bytes) -> bytes:
    """A frame with a right checksum, whatever is in it."""
    return PREFIX.pack(MAGIC, OLD_VERSION, len(body), zlib.crc32(body)) + body
