"""Importance weights for old logprobs that differ from the sampling engine's. Pure functions of tensors.

w = exp(old - behaviour), for a token or for its sample; bounds apply to w itself, not to 1 / w. A weight multiplies the
token's term, and has no gradient. A weight of 0 leaves the token out; the loss's denominator does not change, so other
tokens do not gain weight. All tensors are [n].
"""

import torch

from rollq.consumer.losses.ratios import sequence_product, token_ratio


def token_importance(old: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """w_t = exp(old_t - behaviour_t), as in decoupled PPO (Hilton et al. 2022, arXiv:2110.00641; AReaL, Fu et al.
    2025, arXiv:2505.24298)."""
    return token_ratio(old.detach(), behaviour)


def sequence_importance(old: torch.Tensor, behaviour: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """w = exp(sum over the sample of (old - behaviour)), for each of its tokens."""
    return sequence_product(old, behaviour, samples)


def truncated(importance: torch.Tensor, *, cap: float) -> torch.Tensor:
    """min(w, cap): truncated importance sampling, TIS (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training")."""
    return importance.clamp(max=cap)


def masked(importance: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    """w where low <= w <= high, else 0: masked importance sampling, MIS. With the token's w, this is IcePop (Ling team
    2025, arXiv:2510.18855)."""
    return torch.where((importance >= low) & (importance <= high), importance, 0.0)
