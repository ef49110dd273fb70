"""Losses beside the policy gradient: imitation and distillation. Pure functions of tensors.

Each function returns the terms to minimise, [n]. Each component needs separate weights, such as 1 / the number of that
component's tokens in the whole batch: with a shared denominator, one component's size changes another's weight.
"""

import torch

from rollq.consumer.losses.ratios import token_ratio


def imitation(new: torch.Tensor) -> torch.Tensor:
    """-new: cross-entropy with the sampled tokens, as in SFT."""
    return -new


def distillation(
    new: torch.Tensor, behaviour: torch.Tensor, teacher: torch.Tensor, *, low: float = 0.2, pull: float = 1e-3
) -> torch.Tensor:
    """-sg(teacher - new) u where p - q >= -low, plus `pull` log(u)^2: on-policy distillation on sampled tokens.

    u = exp(new - behaviour) = p / q. `teacher` float [n] holds the teacher's logprobs of the same tokens, in nats. As
    in prime-rl; see Lu et al. 2025, "On-Policy Distillation", Thinking Machines.
    """
    ratio = token_ratio(new, behaviour)
    outside = new.detach().exp() - behaviour.exp() < -low
    gain = (teacher - new).detach() * ratio
    return torch.where(outside, 0.0, -gain) + pull * (new - behaviour) ** 2


def distillation_top_k(new: torch.Tensor, teacher: torch.Tensor, *, tail: bool = True) -> torch.Tensor:
    """KL(policy || teacher) on k tokens of the vocabulary, and with `tail` on all others as one outcome; [n].

    `new` and `teacher` [n, k] hold the logprobs of the same k tokens at each position: sum over k of p log(p /
    teacher), + (1 - sum p) log((1 - sum p) / (1 - sum teacher)).
    """
    kl = (new.exp() * (new - teacher)).sum(-1)
    if not tail:
        return kl
    rest, teacher_rest = _rest(new), _rest(teacher)
    return kl + rest * (rest.log() - teacher_rest.log())


def _rest(logprobs: torch.Tensor) -> torch.Tensor:
    """The probability of all tokens outside the k, at least the dtype's rounding error."""
    return (1 - logprobs.exp().sum(-1)).clamp(min=torch.finfo(logprobs.dtype).eps)
