"""Model folders with safetensors files, as on Hugging Face, and folders of unfinished models.

Invariant: an unfinished model's folder is removed at the end or, if the trainer was killed, at its next start.
"""

import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.weights.manifest import INDEX_FILE, WEIGHTS_FILE
from rollq.consumer.weights.safetensors import write_files, write_tensors
from rollq.consumer.weights.tensor_stream import TensorStream

PREFIX = "weights-"
"""The prefix of weights' names."""
_NOT_CONFIG = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})


class UnfinishedModels:
    """Models written before they are stored, in files of `max_file_bytes`. Their folders are in `parent`; without
    `parent`, they are in `TMPDIR`, and only this user may read them."""

    def __init__(self, buffer: TrainerBuffer, parent: Path | None, max_file_bytes: int) -> None:
        self._buffer = buffer
        self._parent = parent
        self._max_file_bytes = max_file_bytes

    @contextmanager
    def written(self, stream: TensorStream) -> Iterator[Path]:
        """Yield a folder with a stream's model, and remove the folder at the end."""
        prefix = unfinished_prefix(self._buffer, self._parent)
        if self._parent is None:
            folder = Path(tempfile.mkdtemp(prefix=prefix))
        else:
            folder = self._parent / f"{prefix}{secrets.token_hex(4)}"
            folder.mkdir(parents=True)
        try:
            write_model(folder, stream, max_file_bytes=self._max_file_bytes)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        """Remove the folders that a killed trainer of this run left. No other trainer must hold the run."""
        parent = self._parent or Path(tempfile.gettempdir())
        for left in parent.glob(f"{unfinished_prefix(self._buffer, self._parent)}????????"):
            shutil.rmtree(left, ignore_errors=True)


def unfinished_prefix(buffer: TrainerBuffer, parent: Path | None) -> str:
    """The prefix of unfinished folders' names. Runs in other stores may have the same name and share a `TMPDIR`."""
    return f".{PREFIX}{buffer.run}.{f'{buffer.incarnation}.' if parent is None else ''}unfinished-"


def write_model(folder: Path, stream: TensorStream, *, max_file_bytes: int, config_from: Path | None = None) -> None:
    """Write model.safetensors, or shards and their index, into an existing folder.

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
    write_files({folder / file: shard for file, shard in zip(files, shards, strict=True)}, stream)
    index = {
        "metadata": {"total_size": stream.size_bytes},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    (folder / INDEX_FILE).write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))


def copy_config(source: Path, folder: Path) -> None:
    """Copy the configuration and tokenizer files of a Hugging Face folder: all its files except weights."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in _NOT_CONFIG and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def _shards(described: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
    """Divide tensors, in order, into shards of at most `most` bytes."""
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, tensor in described.items():
        if shards[-1] and size + tensor.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards
