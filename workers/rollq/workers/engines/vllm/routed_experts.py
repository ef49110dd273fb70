"""Reads the array `routed_experts` from vLLM's outputs. Pure, and without vLLM."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rollq.buffer.values.routed_experts import number_experts

ARGUMENT = "enable_return_routed_experts"
"""The argument that makes vLLM return routed experts."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A model's choice of experts: `top_k` of `experts` in each of its `layers`, including layers without experts."""

    layers: int
    top_k: int
    experts: int

    @classmethod
    def of(cls, config: Any) -> Self:
        """The shape for a model with vLLM's `ModelConfig`."""
        return cls(
            config.get_total_num_hidden_layers(), int(config.get_num_experts_per_tok()), int(config.get_num_experts())
        )

    def read(self, output: Any, tokens: int) -> npt.NDArray[Any]:
        """The array [tokens, layers, top_k] for a request with `tokens` tokens, including the prompt, from the last
        `CompletionOutput`.

        vLLM returns indices, from 0, for all tokens that it has read or found in its prefix cache, so not for the last
        token. Missing entries are unknown.
        """
        experts = number_experts(np.full((tokens, self.layers, self.top_k), -1), self.experts)
        if output.routed_experts is not None:
            routed = output.routed_experts[: tokens - 1]
            experts[: len(routed)] = number_experts(routed, self.experts)
        return experts
