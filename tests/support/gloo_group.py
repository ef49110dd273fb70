"""Gloo in place of NCCL: the same groups and broadcasts between processes without GPUs."""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed  # its types lack the groups
ADDRESS = "127.0.0.1"
PATIENCE = timedelta(seconds=120)
"""Longer than any test: that somebody gives up first is what they are about."""


class GlooProcessGroup:
    """One rank of a group; rank 0 sends."""

    def __init__(self, address: str, port: int, world_size: int, rank: int = 0) -> None:
        self._store = dist.TCPStore(address, port, world_size, rank == 0, PATIENCE)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("round", self._store), rank, world_size, PATIENCE)

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            self._broadcast(tensor.detach().contiguous())

    def receive(self, update_info: Mapping[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
        """What the trainer sends, one tensor at a time, from what vLLM calls `update_info`."""
        for name, dtype, shape in zip(
            update_info["names"], update_info["dtype_names"], update_info["shapes"], strict=True
        ):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._broadcast(tensor)
            yield name, tensor

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        self._group.abort()


class GlooRendezvous:
    """Meets gloo groups in place of NCCL's."""

    def __call__(self, address: str, port: int, world_size: int) -> GlooProcessGroup:
        return GlooProcessGroup(address, port, world_size)

    def init_info(self, address: str, port: int, world_size: int) -> dict[str, Any]:
        return {"master_address": address, "master_port": port, "world_size": world_size}


def come(init_info: Mapping[str, Any]) -> GlooProcessGroup:
    """Meet the trainer as a worker does."""
    info = dict(init_info)
    return GlooProcessGroup(info["master_address"], info["master_port"], info["world_size"], info["rank_offset"])
