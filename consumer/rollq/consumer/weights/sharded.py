"""Weights that FSDP has spread over ranks, gathered on rank 0."""

from collections.abc import Iterable, Iterator
from typing import Any

from rollq.buffer.weights.probe import Probe
from rollq.consumer.weights.checkpoint_format import Weights, is_model, is_sharded, to_checkpoint_format


def gather_model(weights: Weights, probe: Probe | None, *, rank: int) -> tuple[Weights, Probe | None]:
    """Gather a sharded model as a state dict in checkpoint format, with its probe; other weights come back as given.

    All ranks call it, since each has a part: they compute the probe together, and gather tensor by tensor. The state
    dict is on rank 0's CPU; other ranks get an empty one.
    """
    if not is_model(weights) or not any(map(is_sharded, weights.parameters())):
        return weights, probe
    from rollq.consumer.weights.probe import probe_of  # needs torch

    probe = probe or probe_of(weights)
    whole = dict(gather(weights.state_dict().items(), rank=rank))
    return (to_checkpoint_format(weights, whole) if rank == 0 else {}), probe


def gather(tensors: Iterable[tuple[str, Any]], *, rank: int) -> Iterator[tuple[str, Any]]:
    """Yield each named tensor, whole and on the CPU, on rank 0, and nothing on other ranks. All ranks call it."""
    for name, tensor in tensors:
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        if rank == 0:
            yield name, whole.detach().cpu()
