"""Writes weights as safetensors files and as Hugging Face folders. torch is imported only when tensors are written."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollq.buffer.durable import atomic_folder
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
    with atomic_folder(folder) as unfinished:
        if config_from is not None:
            copy_config(config_from, unfinished)
        (unfinished / WEIGHTS_FILE).write_bytes(weights)
    return folder


def copy_config(source: Path, folder: Path) -> None:
    """Copy the configuration and tokenizer files of a Hugging Face folder: all its files except weights."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in _NOT_CONFIG and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
