"""Records which experts read each token in a model's forward passes."""

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.routed_experts import find_routers, number_experts

ExpertArray = npt.NDArray[np.unsignedinteger[Any]]
"""Experts, numbered from 1; see `rollq.buffer.values.routed_experts`."""


class ExpertRecorder:
    """Records the experts of a model's last forward pass."""

    def __init__(self, model: Any) -> None:
        """Raises `ConfigError` for a model without experts or with experts of an unknown form."""
        routers = find_routers(model)
        if not routers:
            raise ConfigError(
                f"return_routed_experts: {type(model).__name__} has no experts, or chooses them in a way that rollq "
                "cannot record"
            )
        self._layers = int(model.config.get_text_config().num_hidden_layers)
        self._experts = max(router.num_experts for router in routers.values())
        self._last: dict[int, torch.Tensor] = {}
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._record, layer))

    def _record(self, layer: int, router: Any, arguments: Any, output: Any) -> None:
        self._last[layer] = output[-1]

    def take(self, rows: int) -> ExpertArray:
        """The experts [rows, columns, layers, top_k] of the last forward pass over `rows` rows."""
        tokens, top_k = next(iter(self._last.values())).shape
        chosen = torch.full((self._layers, tokens, top_k), -1, device=next(iter(self._last.values())).device)
        for layer, indices in self._last.items():
            chosen[layer] = indices
        numbered = chosen.transpose(0, 1).cpu().numpy()
        return number_experts(numbered, self._experts).reshape(rows, tokens // rows, self._layers, top_k)
