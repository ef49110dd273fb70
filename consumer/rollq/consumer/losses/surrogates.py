"""Policy-gradient surrogates: a term to minimise for each loss token. Pure functions of tensors.

All tensors are [n]. `advantages` are per token. `old` and `behaviour` hold the logprobs before the first update on the
batch and at sampling, in nats, without gradients.
"""

from typing import NamedTuple

import torch

from rollq.consumer.losses.ratios import MOST_NATS, bounded_exp, sequence_product, token_ratio
from rollq.consumer.losses.samples import sample_means


class Surrogate(NamedTuple):
    """The result of a surrogate for n tokens: `terms` to minimise; the `ratio` that it used, without a gradient; and
    `was_clipped`, bool: whether the surrogate bounded or cut the token's gradient. Each is [n]."""

    terms: torch.Tensor
    ratio: torch.Tensor
    was_clipped: torch.Tensor


def clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float, dual: float | None = None
) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A): PPO's surrogate (Schulman et al. 2017, arXiv:1707.06347).

    With the token's ratio, GRPO (Shao et al. 2024, arXiv:2402.03300) and Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)
    use it; with `high` > `low`, DAPO (Yu et al. 2025, arXiv:2503.14476); with the sequence's ratio, GSPO
    (arXiv:2507.18071). `dual` = c > 1 bounds the term by -c A where A < 0 (Ye et al. 2019, arXiv:1912.09729).
    """
    within = ratio.clamp(1 - low, 1 + high)
    gain, bounded = ratio * advantages, within * advantages
    terms = -torch.minimum(gain, bounded)
    was_clipped = bounded < gain
    if dual is not None:
        most = -dual * advantages
        beyond = (advantages < 0) & (terms > most)
        terms = torch.where(beyond, most, terms)
        was_clipped = was_clipped | beyond
    return Surrogate(terms, ratio.detach(), was_clipped.detach())


def geometric(
    new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, samples: torch.Tensor, *, low: float, high: float
) -> Surrogate:
    """-A exp(mean over the sample of d'), d' = new - old clipped to [-low, high] where that lowers d A.

    GMPO (Zhao et al. 2025, arXiv:2507.20673). The bounds apply to log ratios, and A is the mean over the sample.
    """
    difference = (new - old).clamp(-MOST_NATS, MOST_NATS)
    bounded = difference.clamp(-low, high)
    sign = advantages.sign()
    was_clipped = sign * bounded < sign * difference
    pessimistic = torch.where(was_clipped, bounded, difference)
    mean = sample_means(pessimistic.detach(), samples)
    ratio = bounded_exp(mean + (pessimistic - pessimistic.detach()))
    return Surrogate(-sample_means(advantages, samples) * ratio, ratio.detach(), was_clipped.detach())


def cispo(new: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, *, cap: float) -> Surrogate:
    """-sg(min(r, cap)) A new: CISPO (MiniMax 2025, arXiv:2506.13585); no token loses its gradient.

    `cap` bounds the ratio itself: TRL's `epsilon_high` under CISPO, and 1 + verl's `clip_ratio_high`.
    """
    weight = ratio.detach().clamp(max=cap)
    return Surrogate(-weight * advantages * new, ratio.detach(), ratio.detach() > cap)


def one_sided(
    new: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float
) -> Surrogate:
    """-A new, 0 where A > 0 and r > 1 + high, or A < 0 and r < 1 - low: REC-OneSide-NoIS (Yao et al. 2025,
    arXiv:2509.24203). It drops the tokens that `clipped` gives no gradient, and weights the others by 1 instead of
    r."""
    ratio = ratio.detach()
    outside = torch.where(advantages > 0, ratio > 1 + high, (advantages < 0) & (ratio < 1 - low))
    return Surrogate(torch.where(outside, 0.0, -advantages * new), ratio, outside)


def sapo(ratio: torch.Tensor, advantages: torch.Tensor, *, positive: float, negative: float) -> Surrogate:
    """-A (4 / t) sigmoid(t (r - 1)), where t = `positive` if A > 0, else `negative`: SAPO (Gao et al. 2025,
    arXiv:2511.20347). It bounds all tokens softly, and so clips none."""
    temperature = torch.where(advantages > 0, positive, negative)
    terms = -advantages * 4 / temperature * torch.sigmoid(temperature * (ratio - 1))
    return Surrogate(terms, ratio.detach(), torch.zeros_like(advantages, dtype=torch.bool))


def unclipped(ratio: torch.Tensor, advantages: torch.Tensor) -> Surrogate:
    """-r A: REINFORCE (Williams 1992) with importance sampling. On policy, where r = 1, it has the gradient of
    -A new."""
    return Surrogate(-ratio * advantages, ratio.detach(), torch.zeros_like(advantages, dtype=torch.bool))


def topr(new: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, samples: torch.Tensor) -> Surrogate:
    """-A new where A >= 0, else -A sg(min(U, 1)) new with U = exp(sum over the sample of (new - behaviour)).

    TOPR, tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv:2503.14286).
    """
    product = sequence_product(new, behaviour, samples)
    tapered = advantages < 0
    weight = torch.where(tapered, product.clamp(max=1), 1.0)
    return Surrogate(-advantages * weight * new, token_ratio(new.detach(), behaviour), tapered & (product > 1))
