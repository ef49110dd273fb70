"""Ratios of the trained policy to an older policy, per token or per sample. Pure functions of tensors.

Logprobs are in nats, [n]; ratios are [n]. Ratios are capped at exp(`MOST_NATS`), and have no gradient there, so they
are finite in float32 for any finite logprobs.
"""

import torch

from rollq.consumer.losses.samples import sample_means, sample_sums

MOST_NATS = 20.0
"""Largest absolute logarithm of a ratio or weight."""


def bounded_exp(logarithm: torch.Tensor) -> torch.Tensor:
    """exp(logarithm), with the logarithm clamped to +-`MOST_NATS`."""
    return logarithm.clamp(-MOST_NATS, MOST_NATS).exp()


def token_ratio(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """r_t = exp(new_t - old_t)."""
    return bounded_exp(new - old)


def sequence_ratio(new: torch.Tensor, old: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """s_t = exp(mean over the sample of (new - old)), the same for all its tokens.

    The gradient of token t goes through its own logprob only: s_t = sg(s) new_t / sg(new_t), written for probabilities.
    If a sample's tokens share one advantage and one weight, their gradients add up to the sample's gradient. (GSPO and
    GSPO-token, Zheng et al. 2025, arXiv:2507.18071.)
    """
    mean = sample_means((new - old).detach(), samples)
    return bounded_exp(mean + (new - new.detach()))


def sequence_product(new: torch.Tensor, old: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """The ratio of whole samples' probabilities, exp(sum over the sample of (new - old)), without a gradient."""
    return bounded_exp(sample_sums((new - old).detach(), samples))
