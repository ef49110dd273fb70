"""One rank of a gloo group on loopback: trains its share of a batch, combines gradients, writes them to a file."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rollq.consumer import Batch
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.objective.policy_loss import policy_loss, sum_gradients
from support.consumer_groups import random_groups
from support.tiny_qwen3 import tiny_qwen3

MAX_TOKENS = 40


def train_share(rank: int, world_size: int, folder: Path, how: str) -> None:
    """`how` is the way in which the ranks combine their gradients: `sum_gradients`, `ddp` or `fsdp2`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    reduction = "sum" if how == "sum_gradients" else "mean"
    batch = Batch.build(1, random_groups(7), rank=rank, world_size=world_size, reduction=reduction)  # type: ignore[arg-type]
    model, metrics = tiny_qwen3(), LossMetrics()
    called = _wrapped(model, how, world_size)
    micro_batches = batch.micro_batches(MAX_TOKENS)
    assert len(micro_batches) > 1
    for micro in micro_batches:
        policy_loss(called, micro, metrics=metrics).backward()  # type: ignore[no-untyped-call]
    if how == "sum_gradients":
        sum_gradients(model.parameters())
    np.save(folder / f"gradient{rank}.npy", torch.cat([_whole(p.grad).flatten() for p in model.parameters()]).numpy())
    np.save(folder / f"loss{rank}.npy", metrics.loss)
    dist.barrier()
    os._exit(0)  # to take a group down that DDP has used may block for good


def _wrapped(model: Any, how: str, world_size: int) -> Any:
    """What is called in place of the model."""
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp2":
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _whole(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
