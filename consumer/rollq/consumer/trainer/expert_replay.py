"""Replays the engine's routing in the trainer's forward pass of a mixture-of-experts model. Needs torch.

If the engine and the trainer choose different experts for a token, they compute its logprob by different functions,
even with nearly equal weights. Under `replay_experts`, the trainer's routers take the engine's choice, but weight the
experts by the routers' logits, so gradients reach the routers ("Rollout Routing Replay", Ma et al. 2025,
arXiv:2510.11370).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rollq.buffer.errors import ConfigError, InvalidGroup
from rollq.buffer.values.routed_experts import ROUTED_EXPERTS, find_routers
from rollq.consumer.batches.batch import Batch
from rollq.consumer.batches.micro_batch import MicroBatch


@contextmanager
def replay_experts(model: Any, micro: MicroBatch) -> Iterator[None]:
    """Make the routers of `model`, a transformers model, choose the experts in the array `routed_experts` of `micro`.

    The model itself routes tokens and layers that the array omits. Compute the loss and its gradient inside the block:
    with gradient checkpointing, the backward pass routes again. Raises `ConfigError` for a model without known routers,
    `InvalidGroup` if the array does not fit this model.
    """
    routers = routers_of(model)
    recorded = micro.arrays.get(ROUTED_EXPERTS)
    if recorded is None:  # a micro-batch without sequences
        yield
        return
    experts = recorded.flatten(0, 1).long()
    _check(experts, routers)
    try:
        for layer, router in routers.items():
            router.forward = partial(_route, router.forward, experts[:, layer])
        yield
    finally:
        for router in routers.values():
            vars(router).pop("forward", None)


def routers_of(model: Any) -> Mapping[int, Any]:
    """The routers of `model` by layer number. Raises `ConfigError` if it has no routers of a known form."""
    routers = find_routers(model)
    if not routers:
        raise ConfigError(
            f"{type(model).__name__} has no experts, or chooses them in a way that cannot be replayed: "
            "set [trainer] replay_experts = false"
        )
    return routers


def check_recorded(batch: Batch) -> None:
    """Raise `InvalidGroup` unless all sequences of this rank's share have the array `routed_experts`."""
    for sequence in (batch.sequences[index] for index in batch.share):
        if ROUTED_EXPERTS not in sequence.arrays and not sequence.is_masked:
            raise InvalidGroup(
                f"step {batch.step}: group {sequence.group_id} of task {sequence.task!r} has no array "
                f"{ROUTED_EXPERTS!r}, which [trainer] replay_experts needs: in [worker.options], set "
                "return_routed_experts = true for engine 'transformers', or "
                "engine_args = { enable_return_routed_experts = true } for 'vllm'"
            )


def _route(forward: Any, recorded: torch.Tensor, *inputs: torch.Tensor, **options: Any) -> Any:
    """Call a router's `forward` with the experts in `recorded` int64 [T, top_k] instead of the router's choice."""
    with _ChosenExperts(recorded) as chosen:
        output = forward(*inputs, **options)
    if chosen.calls != 1:
        raise ConfigError(
            f"a router called torch.topk {chosen.calls} times, and only one call is supported: set [trainer] "
            "replay_experts = false"
        )
    return output


class _ChosenExperts(TorchFunctionMode):
    """Makes `torch.topk` over experts return the recorded experts with their values. A router turns these values into
    weights as for its own choice."""

    def __init__(self, recorded: torch.Tensor) -> None:
        super().__init__()
        self.calls = 0
        self._recorded = recorded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        self.calls += 1
        is_recorded = (self._recorded > 0).all(dim=-1, keepdim=True)
        chosen = torch.where(is_recorded, self._recorded - 1, result.indices)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


def _check(experts: torch.Tensor, routers: Mapping[int, Any]) -> None:
    """Raise `InvalidGroup` unless these routers can choose the experts int64 [T, layers, top_k], numbered from 1."""
    top_k, most = (max(getattr(router, name) for router in routers.values()) for name in ("top_k", "num_experts"))
    if experts.dim() != 3 or experts.shape[1] <= max(routers) or experts.shape[2] != top_k or experts.max() > most:
        raise InvalidGroup(
            f"array {ROUTED_EXPERTS!r} is {list(experts.shape)} with experts up to {int(experts.max())}: the trainer's "
            f"model has {max(routers) + 1} layers or more, and chooses {top_k} of {most} experts"
        )
