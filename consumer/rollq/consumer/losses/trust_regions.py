"""Surrogates that keep a token while its probability, not its ratio, has moved little. Pure functions of tensors.

p = exp(new) and q = exp(behaviour) are the sampled token's probabilities now and at sampling; u = p / q. All tensors
are [n]; see `rollq.consumer.losses.surrogates`.
"""

import torch

from rollq.consumer.losses.ratios import token_ratio
from rollq.consumer.losses.surrogates import Surrogate

_EPS = 1e-8


def moved_probability(
    new: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """Whether the probability has already moved too far in the direction of the advantage, bool [n].

    Where A > 0: p - q > high; else: q - p > low.
    """
    moved = new.detach().exp() - behaviour.exp()
    return torch.where(advantages > 0, moved > high, -moved > low)


def binary_divergence(new: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """KL(q || p) of the two outcomes "this token" and "another token": q log(q / p) + (1 - q) log((1 - q) / (1 -
    p))."""
    p, q = new.detach().exp(), behaviour.exp()
    return q * (behaviour - new.detach()) + (1 - q) * torch.log((1 - q + _EPS) / (1 - p + _EPS))


def dppo_tv(
    new: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float, cap: float
) -> Surrogate:
    """-A sg(min(u, cap)) new, 0 where `moved_probability`: DPPO with binary total variation (Qi et al. 2026,
    arXiv:2602.04879)."""
    outside = moved_probability(new, behaviour, advantages, low=low, high=high)
    return _weighted(new, behaviour, advantages, outside, cap)


def dppo_kl(
    new: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float, cap: float
) -> Surrogate:
    """-A sg(min(u, cap)) new, 0 where the binary divergence exceeds `high` (A > 0) or `low` and p moved in the
    direction of A: DPPO with binary KL (Qi et al. 2026, arXiv:2602.04879)."""
    divergence = binary_divergence(new, behaviour)
    rose, fell = new.detach() > behaviour, new.detach() < behaviour
    outside = torch.where(advantages > 0, (divergence > high) & rose, (divergence > low) & fell)
    return _weighted(new, behaviour, advantages, outside, cap)


def ipo(
    new: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float, pull: float
) -> Surrogate:
    """-A u where -low <= p - q <= high, plus `pull` log(u)^2 everywhere: IPO, as in prime-rl.

    The second part pulls all tokens back towards the policy that sampled them.
    """
    ratio = token_ratio(new, behaviour)
    moved = new.detach().exp() - behaviour.exp()
    outside = (moved > high) | (-moved > low)
    terms = torch.where(outside, 0.0, -advantages * ratio) + pull * (new - behaviour) ** 2
    return Surrogate(terms, ratio.detach(), outside)


def _weighted(
    new: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, outside: torch.Tensor, cap: float
) -> Surrogate:
    ratio = token_ratio(new.detach(), behaviour)
    terms = torch.where(outside, 0.0, -advantages * ratio.clamp(max=cap) * new)
    return Surrogate(terms, ratio, outside | (ratio > cap))
