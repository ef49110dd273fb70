"""One rank of a gloo group on loopback: trains its share of a batch, sums gradients, writes them to a file."""

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from rollq.consumer import Batch
from rollq.consumer.grpo import grpo_loss, sum_gradients
from support.consumer_groups import random_groups
from support.tiny_qwen3 import flat_gradient, tiny_qwen3


def train_share(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    model = tiny_qwen3()
    for micro in Batch.build(1, random_groups(7), rank=rank, world_size=world_size).micro_batches(40):
        grpo_loss(model, micro).backward()  # type: ignore[no-untyped-call]
    sum_gradients(model.parameters())
    np.save(folder / f"gradient{rank}.npy", flat_gradient(model).numpy())
    dist.destroy_process_group()
