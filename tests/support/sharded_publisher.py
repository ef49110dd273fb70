"""One rank of a trainer whose model FSDP2 has sharded: it takes one batch and publishes the model."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rollq.buffer.errors import WeightsError
from rollq.consumer import Consumer, ConsumerSettings
from support.untrained_models import make_model


def publish_sharded(rank: int, url: str, run: str, folder: Path, family: str) -> None:
    """Publish a model of `family` as version 0, and after a batch, with its parameters doubled, as version 1."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = make_model(family).eval()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    settings = ConsumerSettings(launch_id="one", rank=rank, world_size=2, timeout_s=60)
    with Consumer.connect(url, run=run, weights=model, settings=settings) as consumer:
        batch = next(consumer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        consumer.publish(model, step=batch.step)
        try:
            consumer.publish(model.state_dict(), step=batch.step)
        except WeightsError as error:
            (folder / f"refused{rank}").write_text(str(error))
        dist.barrier()
        consumer.commit(batch)
    os._exit(0)
