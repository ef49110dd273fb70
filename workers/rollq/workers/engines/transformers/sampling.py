"""Samples a batch's next tokens, each row with separate parameters and random numbers.

Invariant: the returned logprob belongs to the distribution that was sampled, after temperature, min-p, top-k and top-p.
A row's random number depends only on its seed and position, never on the batch's other rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from rollq.buffer.common.splitmix import GOLDEN_GAMMA, splitmix64
from rollq.workers.engines.protocol import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """The parameters of B rows as tensors [B]. `min_p` is None when no row truncates by it; so are `top_k` and `top_p`
    when no row truncates by either."""

    temperature: torch.Tensor
    min_p: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None

    @classmethod
    def from_rows(cls, rows: Sequence[Sampling], device: torch.device) -> Self:
        """Collect the parameters of `rows`."""
        truncates = any(row.top_k > 0 or row.top_p < 1 for row in rows)
        no_limit = torch.iinfo(torch.int64).max
        return cls(
            torch.tensor([row.temperature for row in rows], device=device),
            torch.tensor([row.min_p for row in rows], device=device) if any(row.min_p for row in rows) else None,
            torch.tensor([row.top_k or no_limit for row in rows], device=device) if truncates else None,
            torch.tensor([row.top_p if row.top_p < 1 else 2.0 for row in rows], device=device) if truncates else None,
        )


def token_logprobs(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The log probabilities float32 [B, V], in nats, of the distributions to sample; -inf for truncated tokens.

    Applies temperature, min-p, top-k, and top-p within the remaining tokens, in vLLM's order.
    """
    scaled = logits.float() / rows.temperature[:, None]
    if rows.min_p is not None:
        lowest = scaled.amax(dim=-1, keepdim=True) + rows.min_p.log()[:, None]
        scaled = scaled.masked_fill(scaled < lowest, -torch.inf)
    if rows.top_k is not None and rows.top_p is not None:
        ordered, order = scaled.sort(dim=-1, descending=True)
        rank = torch.arange(scaled.shape[-1], device=scaled.device)
        ordered = ordered.masked_fill(rank >= rows.top_k[:, None], -torch.inf)
        mass = ordered.softmax(dim=-1)
        ordered = ordered.masked_fill(mass.cumsum(dim=-1) - mass >= rows.top_p[:, None], -torch.inf)
        scaled = torch.empty_like(scaled).scatter(-1, order, ordered)
    return scaled.log_softmax(dim=-1)


def sample(logprobs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row by inverting the cumulative distribution at `uniforms` float64 [B] in [0, 1).

    Returns ids int64 [B] and their logprobs float32 [B]. An id of probability 0 is never drawn.
    """
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    ids = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    ids = ids.clamp_(max=logprobs.shape[-1] - 1)
    return ids.squeeze(-1), logprobs.gather(-1, ids).squeeze(-1)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Random numbers [B] in [0, 1), one for each (seed, position), made by SplitMix64 as a hash."""
    bits = splitmix64(splitmix64(seeds) + positions * np.uint64(GOLDEN_GAMMA))
    # 52 bits: the largest value times any sum of probabilities still rounds below that sum.
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52
