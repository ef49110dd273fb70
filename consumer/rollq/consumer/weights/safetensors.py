"""Writes weights as safetensors files, tensor by tensor.

Invariant: writing takes the memory of one tensor, for files of any size. The bytes of a file depend only on its
tensors.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from rollq.consumer.weights.tensor_stream import TensorStream


def write_tensors(path: Path, stream: TensorStream) -> None:
    """Write all tensors of a stream into one safetensors file."""
    write_files({path: stream.described}, stream)


def write_files(files: Mapping[Path, Mapping[str, Any]], stream: TensorStream) -> None:
    """Write a stream into files (path -> the tensors in it, as in `TensorStream.described`): the headers of all files,
    then each tensor, at its offset, when it arrives. Raises the stream's exceptions."""
    places: dict[str, tuple[Path, int]] = {}
    for path, described in files.items():
        header, offsets = _layout(described)
        path.write_bytes(header)
        places |= {name: (path, len(header) + offset) for name, offset in offsets.items()}
    for name, tensor in stream:
        path, offset = places[name]
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes_of(tensor))
        del tensor  # before the next tensor is gathered


def bytes_of(tensor: Any) -> memoryview:
    """The bytes of a tensor, as in files."""
    import torch

    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(raw.numpy())


def _layout(described: Mapping[str, Any]) -> tuple[bytes, dict[str, int]]:
    """A safetensors file's header, preceded by its length, and each tensor's offset after the header.

    Wide dtypes come first, which aligns all tensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, tensor in sorted(described.items(), key=lambda named: (-named[1].element_size(), named[0])):
        offsets[name], end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    encoded = orjson.dumps(header)
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded, offsets


@cache
def _dtype_name(dtype: Any) -> str:
    """The name of a torch dtype in safetensors, such as `BF16`."""
    import torch
    from safetensors.torch import save

    empty = save({"tensor": torch.empty(0, dtype=dtype)})
    name: str = orjson.loads(empty[8 : 8 + int.from_bytes(empty[:8], "little")])["tensor"]["dtype"]
    return name
