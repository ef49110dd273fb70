"""Writes weights as safetensors files, tensor by tensor, and as Hugging Face folders.

Invariant: writing takes the memory of one tensor, for files of any size. The bytes of a file depend only on its
tensors.
"""

import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from rollq.buffer.weights.manifest import INDEX_FILE, WEIGHTS_FILE
from rollq.consumer.weights.sources import TensorStream

_NOT_CONFIG = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})


def write_model(folder: Path, stream: TensorStream, *, max_file_bytes: int, config_from: Path | None = None) -> None:
    """Write model.safetensors into an existing folder, or shards and their index.

    A shard has a header and at most `max_file_bytes` of tensors; a larger tensor has a shard to itself. The
    configuration and tokenizer files of `config_from` are copied too.
    """
    if config_from is not None:
        copy_config(config_from, folder)
    shards = _shards(stream.described, max_file_bytes)
    if len(shards) == 1:
        write_tensors(folder / WEIGHTS_FILE, stream)
        return
    stem, count = WEIGHTS_FILE.removesuffix(".safetensors"), len(shards)
    files = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    _write({folder / file: shard for file, shard in zip(files, shards, strict=True)}, stream)
    index = {
        "metadata": {"total_size": stream.size_bytes},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    (folder / INDEX_FILE).write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))


def write_tensors(path: Path, stream: TensorStream) -> None:
    """Write all tensors of a stream into one safetensors file."""
    _write({path: stream.described}, stream)


def copy_config(source: Path, folder: Path) -> None:
    """Copy the configuration and tokenizer files of a Hugging Face folder: all its files except weights."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in _NOT_CONFIG and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def _shards(described: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
    """Divide tensors into shards of at most `most` bytes, in their order."""
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, tensor in described.items():
        if shards[-1] and size + tensor.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write(files: Mapping[Path, Mapping[str, Any]], stream: TensorStream) -> None:
    """Write the headers of all files, then each tensor to its place when it arrives. Raises the stream's exceptions."""
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
    """The header of a safetensors file, with its length, and the start of each tensor's bytes after it.

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
