"""One rank of two that save a sharded model, of which rank 0 fails."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rollq.buffer.errors import WeightsError
from rollq.consumer.trainer.checkpoints import save_checkpoint
from rollq.consumer.weights import safetensors
from rollq.consumer.weights.checkpoint_format import Part, model_stream
from rollq.consumer.weights.sources import gathering
from support.tiny_qwen3 import tiny_qwen3


def fail_on_rank_0(rank: int, folder: Path, step: str, way: str) -> None:
    """Save a model in one of two ways, while rank 0 fails at its third tensor, in `step`."""
    _meet(rank, folder)
    model = _sharded(tiny_qwen3())
    optimizer = torch.optim.AdamW(model.parameters())
    (folder / "config").mkdir(exist_ok=True)
    at, name = {"write": (safetensors, "bytes_of"), "convert": (Part, "convert")}[step]
    failing = pytest.MonkeyPatch()
    failing.setattr(at, name, _failing(getattr(at, name)))
    if rank != 0:
        _save(way, rank, folder, model, optimizer)
    else:
        with pytest.raises(OSError, match="the disk is full"):
            _save(way, rank, folder, model, optimizer)
    failing.undo()
    _save(way, rank, folder, model, optimizer)  # the ranks are still in step
    dist.barrier()
    os._exit(0)


def tie_unequally(rank: int, folder: Path, sharded: int) -> None:
    """Refuse a tied model, whose head differs in the part of rank 1 or is not sharded, on both ranks."""
    _meet(rank, folder)
    model: Any = tiny_qwen3(tied=True)
    head = model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    with torch.no_grad():
        head[-1] += 1
    if sharded == 2:
        _sharded(model)
    else:
        fully_shard(model.model, mesh=init_device_mesh("cpu", (2,)))
    expected = "differs from" if sharded == 2 else "is sharded and 'lm_head.weight', which the model ties to it, is not"
    with pytest.raises(WeightsError, match=expected):
        model_stream(model)
    dist.barrier()
    os._exit(0)


def _meet(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)


def _sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _save(way: str, rank: int, folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    if way == "checkpoint":
        save_checkpoint(folder, 1, "", model, optimizer, folder / "config", rank=rank)
    else:
        with gathering(model, None, rank=rank) as stream:
            if rank == 0:
                safetensors.write_tensors(folder / "file", stream)  # type: ignore[arg-type]


def _failing(called: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def fails(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("the disk is full")
        return called(*given)

    return fails
