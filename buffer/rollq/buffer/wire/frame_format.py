"""The layout of a frame, which holds a whole group's samples, or a single sample.

A frame is a prefix and a safetensors blob; `safetensors.numpy.load(frame[PREFIX.size:])` reads it.

    prefix         24 bytes, little endian: magic, layout version, length and xxh3_64 of all that follows
    header         8 bytes of length, then JSON: tensor name -> dtype, shape, offsets; padded to 8 bytes
    prompts        int32    the different prompts, one after another
    ids            int32    the response ids of every segment, one after another
    logprobs       float32  of every response id
    loss_mask      bool     of every response id; absent when no segment has a mask
    s<i>/<name>    any      the named arrays of segment i, counted over all samples
    layout         uint8    JSON: what training needs beside the arrays; lengths, version spans, rewards, references
    details        uint8    JSON: all else, by field; a value that all samples share is written once

Tensors with larger items come first, so that every array of a frame is aligned and decodes as a view. Invariant: for
any bytes, `decode_samples` returns samples or raises `CorruptFrame`. `Sample` objects are made on first use.
"""

import struct
from collections.abc import Mapping
from types import NoneType

from rollq.buffer.values.failures import FailureKind

MAGIC = b"RQSF"
FRAME_VERSION = 3
PREFIX = struct.Struct("<4sIQQ")
HEAD = struct.Struct(PREFIX.format + "Q")
MAX_FRAME_BYTES = 512 << 20
"""The longest string that Redis keeps."""
DETAILS: Mapping[str, tuple[type, ...]] = {
    "reward_parts": (dict,),
    "text": (str,),
    "error": (str, NoneType),
    "failure": (FailureKind, NoneType),
    "sampling": (dict,),
    "extra": (dict,),
    "session_id": (str, NoneType),
    "tools": (list, tuple),
    "tool_choice": (str, dict, NoneType),
}
"""The fields that only a `Sample` object has, and their value types."""
EMPTY: Mapping[type, bytes] = {dict: b"{}", str: b'""', NoneType: b"null", list: b"[]", tuple: b"[]"}
"""Empty values as JSON, which most fields of most samples have."""
