"""Weights under the names and shapes that they have in files.

transformers fuses, renames and transposes tensors as it loads a model: the experts of a layer, one tensor per expert in
files, are one tensor in memory. Engines expect what is in files, so models are converted before they are published.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.manifest import Verify, describe_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weights: TypeAlias = "Path | Mapping[str, Any] | PreTrainedModel"
"""A folder, a state dict (name -> torch tensor), or a model of transformers."""
Shapes = Mapping[str, tuple[int, ...]]


def to_checkpoint_format(model: "PreTrainedModel", state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state dict of `model` to the names and shapes that `model.save_pretrained` writes.

    `state_dict` holds whole tensors under the names of `model.state_dict()`, as gathered from FSDP or DeepSpeed; the
    parameters of `model` itself are not read. Fused experts are split, and tied tensors kept once, also where they no
    longer share memory. Dtypes and devices stay; tensors that are not converted are not copied. A state dict without
    fused or tied tensors comes back equal. Raises `WeightsError` for tensors that are sharded, and for tied ones that
    differ.
    """
    from transformers.core_model_loading import revert_weight_conversion

    kept = {name: tensor for name, tensor in state_dict.items() if name not in (model._keys_to_ignore_on_save or ())}
    _check_whole(kept)
    for name, source in model.all_tied_weights_keys.items():
        tensor = kept.pop(name, None)
        if tensor is not None and not kept.setdefault(source, tensor).equal(tensor):
            raise WeightsError(f"{name!r} differs from {source!r}, to which the model ties it: gather both again")
    converted: dict[str, Any] = revert_weight_conversion(model, kept)
    return converted


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor, of which each rank holds a part, as of FSDP or tensor parallelism."""
    return hasattr(tensor, "full_tensor")


def _check_whole(state_dict: Mapping[str, Any]) -> None:
    """Raise `WeightsError` for a tensor that is sharded."""
    for name, tensor in state_dict.items():
        if is_sharded(tensor):
            raise WeightsError(
                f"tensor {name!r} is sharded over ranks: publish the model itself, on all ranks; or gather a full "
                "state dict on all ranks, and publish to_checkpoint_format(model, state_dict)"
            )


def is_model(weights: object) -> "TypeGuard[PreTrainedModel]":
    """Whether this is a model of transformers."""
    transformers = sys.modules.get("transformers")  # an object of a module that is not imported does not exist
    return transformers is not None and isinstance(weights, transformers.PreTrainedModel)


def publishable(weights: Weights) -> Path | Mapping[str, Any]:
    """Convert a model to a state dict in checkpoint format; return a folder or a state dict as it is.

    Raises `WeightsError` for anything else, and for sharded tensors.
    """
    if isinstance(weights, Path):
        return weights
    if isinstance(weights, Mapping):
        _check_whole(weights)
        return weights
    if not is_model(weights):
        raise WeightsError(
            f"cannot publish a {type(weights).__name__}: publish a transformers.PreTrainedModel (the one inside, if it "
            "is wrapped), a state dict, or the Path of a folder"
        )
    return to_checkpoint_format(weights, weights.state_dict())


def model_shapes(weights: Path | Mapping[str, Any]) -> Shapes | None:
    """The shapes of a model's tensors, by name; None for a LoRA adapter. Raises `WeightsError` for unreadable files."""
    if not isinstance(weights, Path):
        return _shapes(weights)
    manifest = describe_folder(weights, Verify.SIZES)
    return _shapes(manifest.tensors) if manifest.kind == "full" else None


def check_format(tensors: Mapping[str, Any], started_from: Shapes) -> None:
    """Raise `WeightsError` if tensors have other names or shapes than those that training started from.

    Names may be absent on one side only: a tied head is in some files and not in others.
    """
    found = _shapes(tensors)
    missing, unknown = sorted(started_from.keys() - found.keys()), sorted(found.keys() - started_from.keys())
    if missing and unknown:
        difference = f"they lack {missing[0]!r}, and have {unknown[0]!r} instead"
    elif changed := sorted(name for name in found.keys() & started_from.keys() if found[name] != started_from[name]):
        difference = f"{changed[0]!r} has shape {found[changed[0]]}, not {started_from[changed[0]]}"
    else:
        return
    raise WeightsError(
        f"these weights do not match those that training started from: {difference}. Pass the model itself, or "
        "to_checkpoint_format(model, state_dict), to connect and publish: its names and shapes are those of files"
    )


def _shapes(tensors: Mapping[str, Any]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
