"""Tensors in the data of a safetensors blob, read without a copy."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

DTYPES: Final = {
    tag: np.dtype(code)
    for tag, code in {
        "F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "BOOL": "?",
        "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
        "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
    }.items()
}  # fmt: skip
"""The dtypes of arrays, by their name in safetensors."""


def view_tensor(blob: bytes, data_at: int, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    """The tensor that `entry` of the header describes, in data that begins at byte `data_at`; a read-only view.

    Raises `LookupError`, `TypeError` or `ValueError` for an entry that describes none.
    """
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(blob):  # numpy itself does not refuse a negative offset
        raise ValueError(f"data offsets {begin} and {end}")
    array: npt.NDArray[Any] = np.ndarray(entry["shape"], DTYPES[entry["dtype"]], blob, data_at + begin)
    if array.nbytes != end - begin:
        raise ValueError(f"data offsets {begin} and {end} for {array.nbytes} bytes")
    return array
