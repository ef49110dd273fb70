"""Writes weights as safetensors files and as Hugging Face folders. torch is imported only when tensors are written.

Invariant: a folder appears under its name only when it is complete and on disk.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollq.buffer.weights.manifest import WEIGHTS_FILE

_NOT_CONFIG = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})


def to_safetensors(tensors: Mapping[str, Any]) -> bytes:
    """Serialise a state dict (name -> torch tensor), tensors that share memory once, as a safetensors file."""
    from safetensors.torch import save

    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in shared_once(tensors).items()}
    return save(kept, metadata={"format": "pt"})


def shared_once(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only the first of tensors that share memory (tied embeddings), as `save_pretrained` does."""
    seen: set[tuple[int, int]] = set()
    kept: dict[str, Any] = {}
    for name, tensor in tensors.items():
        identity = (tensor.data_ptr(), tensor.numel())
        if tensor.numel() and identity in seen:
            continue
        seen.add(identity)
        kept[name] = tensor
    return kept


def write_model(folder: Path, weights: bytes, config_from: Path | None = None) -> Path:
    """Write `folder`/model.safetensors, with the configuration and tokenizer files of `config_from` beside it.

    An existing `folder` is replaced. It appears complete or not at all.
    """
    unfinished = start_folder(folder)
    if config_from is not None:
        copy_config(config_from, unfinished)
    write_synced(unfinished / WEIGHTS_FILE, weights)
    return finish_folder(unfinished, folder)


def copy_config(source: Path, folder: Path) -> None:
    """Copy the configuration and tokenizer files of a Hugging Face folder: all its files except weights."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in _NOT_CONFIG and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def start_folder(folder: Path) -> Path:
    """An empty folder beside `folder`, to be filled and then renamed by `finish_folder`."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def finish_folder(unfinished: Path, folder: Path) -> Path:
    """Give a filled folder its name, once everything in it is on disk."""
    _sync_folder(unfinished)
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)
    _sync_folder(folder.parent)
    return folder


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
