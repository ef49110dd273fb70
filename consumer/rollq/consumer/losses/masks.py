"""Masks of the tokens that a loss keeps, bool [n]. Pure functions of tensors.

A dropped token adds 0 to the loss; the denominator stays. Logprobs are in nats, [n].
"""

from typing import Literal

import torch

from rollq.consumer.losses.ratios import bounded_exp
from rollq.consumer.losses.samples import sample_maxima, sample_means


def geometric_mask(
    old: torch.Tensor, behaviour: torch.Tensor, samples: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """Keep a sample where low <= exp(mean over the sample of (old - behaviour)) <= high: geometric MIS.

    The bounds apply to w. In verl's `rs_seq_mean_k1`, they apply to 1 / w: its [a, b] is [1 / b, 1 / a] here.
    """
    mean = bounded_exp(sample_means((old - behaviour).detach(), samples))
    return (mean >= low) & (mean <= high)


def off_policy_mask(
    new: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, samples: torch.Tensor, *, most: float
) -> torch.Tensor:
    """Drop a token where A < 0 and the sample's mean of (behaviour - new) is more than `most`, in nats.

    Off-policy sequence masking, OPSM (DeepSeek-AI 2025, "DeepSeek-V3.2").
    """
    divergence = sample_means((behaviour - new).detach(), samples)
    return (advantages >= 0) | (divergence <= most)


def divergence_mask(
    old: torch.Tensor,
    behaviour: torch.Tensor,
    samples: torch.Tensor,
    *,
    estimator: Literal["k2", "k3"],
    over: Literal["token", "mean", "max"],
    most: float,
) -> torch.Tensor:
    """Keep a token where the divergence of old from behaviour is at most `most`. The divergence is the token's own, or
    the mean or the largest of its sample. With d = old - behaviour, k2 is d^2 / 2, and k3 is exp(d) - d - 1 (Schulman
    2020)."""
    difference = (old - behaviour).detach()
    divergence = difference**2 / 2 if estimator == "k2" else bounded_exp(difference) - difference - 1
    if over != "token":
        divergence = (sample_means if over == "mean" else sample_maxima)(divergence, samples)
    return divergence <= most


def second_moment_mask(old: torch.Tensor, behaviour: torch.Tensor, *, most: float) -> torch.Tensor:
    """Drop the tokens with the largest (behaviour - old)^2 until the mean of the others is less than `most`.

    M2PO (Zheng et al. 2025, arXiv:2510.01161). The mean covers the whole batch: pass the logprobs of all micro-batches'
    and ranks' loss tokens, and give each micro-batch its part of the result (see `policy_loss(keep=)`).
    """
    squares = ((behaviour - old) ** 2).detach()
    ordered, index = squares.sort(descending=True, stable=True)
    left = torch.arange(len(ordered), 0, -1, device=squares.device)
    means = ordered.flip(0).cumsum(0).flip(0) / left  # of each token and those after it
    dropped = int((means >= most).sum())  # the means fall
    is_kept = torch.ones_like(squares, dtype=torch.bool)
    is_kept[index[:dropped]] = False
    return is_kept
