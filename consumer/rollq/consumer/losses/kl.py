"""Estimators of KL(policy || reference) on sampled tokens. Pure functions of tensors.

d = new - reference, in nats, [n] (Schulman 2020, "Approximating KL divergence"). In a loss, only an estimator's
gradient matters. In expectation and on policy, k2 has the divergence's gradient. The gradient of k1 is 0 in
expectation, so k1 belongs in the reward.
"""

import torch

from rollq.consumer.losses.ratios import MOST_NATS


def k1(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """d: unbiased, and negative for some tokens."""
    return new - reference


def k2(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased, with the right gradient."""
    return (new - reference) ** 2 / 2


def k3(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """exp(-d) + d - 1: unbiased, and never negative. GRPO (arXiv:2402.03300) uses it."""
    difference = (reference - new).clamp(max=MOST_NATS)
    return difference.exp() - difference - 1


def k3_unbiased(new: torch.Tensor, reference: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """r k3, with the gradient of both: from an older policy's samples, it estimates the trained policy's divergence
    (DeepSeek-AI 2025, "DeepSeek-V3.2"). `ratio` is exp(new - old) with its gradient."""
    return ratio * k3(new, reference)


def k3_by_k2(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The value of k3 with the gradient of k2; verl's `k3+`."""
    square = k2(new, reference)
    return square - square.detach() + k3(new, reference).detach()


def kl_in_reward(
    advantages: torch.Tensor, new: torch.Tensor, reference: torch.Tensor, *, coefficient: float
) -> torch.Tensor:
    """A - coefficient sg(d): the divergence as a penalty in the reward of each token."""
    return advantages - coefficient * (new - reference).detach()
