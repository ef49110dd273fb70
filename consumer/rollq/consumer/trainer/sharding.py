"""A model whose parameters are sharded over ranks by FSDP2. Needs torch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(model: Any, *, world_size: int, device: str, compute_dtype: torch.dtype | None) -> None:
    """Shard a transformers model in place. Each decoder layer is gathered when it runs; all other parameters are
    gathered together.

    With `compute_dtype`, parameters have that dtype in forward and backward passes; gradients are still reduced in
    float32, and the optimizer keeps the dtype of the parameters.
    """
    mesh = init_device_mesh(device, (world_size,))
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in (*decoder_layers(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def reshard(model: Any) -> None:
    """Free the parameters outside the decoder layers, which a pass without gradients leaves gathered. Until then,
    `model.parameters()` returns gathered parameters, which must not reach an optimizer.
    """
    if isinstance(model, FSDPModule):
        model.reshard()


def decoder_layers(model: Any) -> Iterator[torch.nn.Module]:
    """The layers that transformers declares indivisible, such as `Qwen3DecoderLayer`."""
    names = set(model._no_split_modules or ())
    return (module for module in model.modules() if type(module).__name__ in names)


def like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor on the device of `parameter`, reduced to this rank's shard if `parameter` is sharded."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(
            tensor.to(parameter.to_local().device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    return tensor.to(parameter.device)


def whole_number(value: torch.Tensor) -> float:
    """The value of a scalar, which may be sharded, like norms of sharded gradients. All ranks call it."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)
