"""Loads weights from disk into a model. Invariant: a model changes only after the file has passed all checks, so a bad
file leaves the old weights in place."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.manifest import weight_files
from rollq.workers.engines.tensors import Tensors, check_tensors, is_adapter, torch_tensor


def weight_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors in a weights file for `model`, by name: each shared tensor once, under its first name.

    Like `save_pretrained`, this omits `lm_head.weight` if the embeddings are tied.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    persistent = model.state_dict().keys()
    tensors.update((name, buffer) for name, buffer in model.named_buffers() if name in persistent)
    return tensors


def read_weights(folder: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Read and check the weights in `folder` against `model`, which is not changed.

    Raises `WeightsError` if the files are truncated or their tensors fail `check_tensors`.
    """
    if is_adapter(folder):
        raise WeightsError(f"weights {str(folder)!r} are a LoRA adapter, which engine 'transformers' does not serve")
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            tensors |= load(path.read_bytes())  # read into memory: a mapped file could fail or change during the copy
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read weights {str(path)!r}: {error}; publish them again") from error
    expected = weight_tensors(model)
    if tensors.keys() - expected.keys():
        tensors = _converted(tensors, model)
    check_tensors(_described(tensors), _described(expected), str(folder))
    return tensors


def _converted(tensors: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Return weights under their names in memory: transformers fuses experts when it loads them.

    Unknown names stay unchanged.
    """
    try:
        loaded, report = type(model).from_pretrained(
            None, config=model.config, state_dict=tensors, dtype=model.dtype, output_loading_info=True
        )
    except RuntimeError as error:
        raise WeightsError(f"weights belong to another model: {error}") from error
    unknown = {name: tensors[name] for name in report["unexpected_keys"]}
    converted = {name: tensor for name, tensor in weight_tensors(loaded).items() if name not in report["missing_keys"]}
    return converted | unknown


@torch.no_grad()
def copy_weights(weights: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Copy weights from `read_weights` into `model`, in place, in the model's dtype and on its device."""
    for name, tensor in weight_tensors(model).items():
        tensor.copy_(weights[name])


def _described(tensors: dict[str, torch.Tensor]) -> Tensors:
    return {
        name: torch_tensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
