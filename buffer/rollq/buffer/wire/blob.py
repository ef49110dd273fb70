"""Parts of frames: tensors in the data of a safetensors blob, read without a copy, and version spans."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rollq.buffer.values.rollouts import VersionSpan, unversioned
from rollq.buffer.wire.validation import MOST_VERSIONS

DTYPES: Final = {
    tag: np.dtype(code)
    for tag, code in {
        "F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "BOOL": "?",
        "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
        "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
    }.items()
}  # fmt: skip
"""Array dtypes, by their names in safetensors."""


def view_tensor(blob: bytes, data_at: int, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Return a read-only view of the tensor that the header's `entry` describes, in data from byte `data_at` on.

    Raises `LookupError`, `TypeError` or `ValueError` for an entry that describes no tensor.
    """
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(blob):  # numpy itself does not refuse a negative offset
        raise ValueError(f"data offsets {begin} and {end}")
    array: npt.NDArray[Any] = np.ndarray(entry["shape"], DTYPES[entry["dtype"]], blob, data_at + begin)
    if array.nbytes != end - begin:
        raise ValueError(f"data offsets {begin} and {end} for {array.nbytes} bytes")
    return array


def check_vectors(ids: Sequence[Any], logprobs: Any, mask: Any) -> None:
    """Raise `ValueError` unless these are vectors of int32, float32 and bool. `mask` may be None."""
    wanted = [
        *((array, np.int32) for array in ids),
        (logprobs, np.float32),
        *([] if mask is None else [(mask, np.bool_)]),
    ]
    for array, dtype in wanted:
        if array.dtype != dtype or array.ndim != 1:
            raise ValueError(f"{array.dtype} {list(array.shape)} instead of a vector of {dtype.__name__}")


def decode_spans(spans: Sequence[Sequence[int]], tokens: int) -> tuple[VersionSpan, ...]:
    """Decode a segment's version spans. Raises `ValueError` unless they cover its `tokens`."""
    decoded, covered = tuple(map(VersionSpan._make, spans)), 0
    for epoch, version, count in decoded:
        is_whole = type(epoch) is type(version) is type(count) is int and 0 <= count <= MOST_VERSIONS
        is_versioned = is_whole and 0 <= epoch <= MOST_VERSIONS and 0 <= version <= MOST_VERSIONS
        if not (is_versioned or (is_whole and decoded == unversioned(count))):
            raise ValueError(f"version spans {spans!r}")
        covered += count
    if type(tokens) is not int or covered != tokens:
        raise ValueError(f"version spans {spans!r} of {tokens} tokens")
    return decoded
