"""Computes bit sums of a model's parameters; see `BitSums`. Needs torch."""

import torch

from rollq.buffer.weights.probe import BitSums

SUMMED = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes whose values are rounded at most once on their way to bfloat16."""
COMPARABLE = frozenset({torch.float32, torch.bfloat16})
"""Engine dtypes that hold every bfloat16 exactly."""


@torch.no_grad()
def bit_sums(model: torch.nn.Module, dtypes: frozenset[torch.dtype] = SUMMED) -> dict[str, BitSums]:
    """The bit sums, by name, of parameters that have one of these dtypes and are whole in this process."""
    return {
        name: BitSums(tuple(tensor.shape), _sums(tensor))
        for name, tensor in model.named_parameters()
        if tensor.dtype in dtypes and not tensor.is_meta and not hasattr(tensor, "full_tensor")
    }


def _sums(tensor: torch.Tensor) -> tuple[int, ...]:
    parts = tensor.unbind() if tensor.dim() > 2 else (tensor,)
    sums = [part.bfloat16().contiguous().view(torch.int16).sum(dtype=torch.int64) for part in parts]
    return tuple(torch.stack(sums).tolist()) if sums else ()
