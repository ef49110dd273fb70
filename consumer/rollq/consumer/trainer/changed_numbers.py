"""Measures how many of a model's numbers a step changes: few if updates are rounded away. Needs torch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rollq.consumer.trainer.ranks import Ranks

LEAST_SHARE = 0.05
"""The fraction of the trained numbers below which a trainer warns. AdamW moves all numbers with a gradient; some have
none, such as an embedding's rows for tokens that did not occur."""
LOOKED_AT = 1 << 16
"""How many numbers of a tensor are compared, spread evenly over it."""


class ChangedNumbers:
    """Remembers numbers of the trained parameters to compare them after a step's updates."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._before = [numbers.clone() for numbers, _ in self._looked_at()]

    def share(self, ranks: Ranks) -> float:
        """The share of numbers that have changed since construction, in [0, 1], over all ranks. All ranks call it.

        Tensors with more than `LOOKED_AT` numbers are compared only in part.
        """
        changed = total = 0.0
        for before, (after, size) in zip(self._before, self._looked_at(), strict=True):
            changed += float((before != after).float().mean()) * size
            total += size
        everywhere = ranks.gather([changed, total])
        share: float = sum(changed for changed, _ in everywhere) / max(sum(size for _, size in everywhere), 1)
        return share

    def _looked_at(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Each tensor's compared numbers and its size, or those in this rank's part of the tensor."""
        for parameter in self._model.parameters():
            local = _local(parameter.detach())
            if parameter.requires_grad and local.numel():
                stride = -(-local.numel() // LOOKED_AT) | 1  # odd, so different rows give different columns
                yield local.reshape(-1)[::stride], local.numel()


def _local(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part
