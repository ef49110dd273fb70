"""Named torch tensors: which are sharded over ranks, which share memory, and their forms in files."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from rollq.buffer.errors import WeightsError

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def shapes_of(tensors: Mapping[str, Any]) -> Shapes:
    """The shapes of tensors, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor: each rank holds a part, as with FSDP or tensor parallelism."""
    return hasattr(tensor, "full_tensor")


def check_whole(state_dict: Mapping[str, Any]) -> None:
    """Raise `WeightsError` for a sharded tensor."""
    for name, tensor in state_dict.items():
        if is_sharded(tensor):
            raise WeightsError(
                f"tensor {name!r} is sharded over ranks: publish the model itself, on all ranks; or gather a full "
                "state dict on all ranks, and publish to_checkpoint_format(model, state_dict)"
            )


def shared_once(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only the first of tensors that share memory (tied embeddings), as `save_pretrained` does."""
    seen: set[tuple[int, int]] = set()
    once: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not is_sharded(tensor):
            identity = (tensor.data_ptr(), tensor.numel())
            if tensor.numel() and identity in seen:
                continue
            seen.add(identity)
        once[name] = tensor
    return once


def on_meta(tensor: Any, dtype: str | None) -> Any:
    """A tensor's form in files, on torch's meta device. With `dtype`, floating-point numbers are rounded to it."""
    import torch

    return torch.empty(tensor.shape, dtype=_dtype_in_file(tensor, dtype), device="meta")


def _dtype_in_file(tensor: Any, dtype: str | None) -> Any:
    import torch

    if dtype is None or not tensor.is_floating_point() or tensor.element_size() < 2:
        return tensor.dtype
    return getattr(torch, dtype)
