"""A critic's advantages and its loss. Pure functions of tensors.

Tensors cover only loss tokens, [n], in the order of the text. Masked tokens, such as the environment's, are skipped, as
if the next loss token followed at once.
"""

import torch


def generalised_advantages(
    rewards: torch.Tensor, values: torch.Tensor, samples: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's advantage, not whitened, and its return, [n] each: GAE (Schulman et al. 2016, arXiv:1506.02438).

    delta_t = reward_t + gamma V_(t+1) - V_t and A_t = delta_t + gamma lam A_(t+1), where t + 1 is the next token of the
    sample, and V and A are 0 after its last; the return is A_t + V_t. Rewards of a whole sample belong on its last loss
    token. `samples` int64 [n]: see `rollq.consumer.losses.samples`.
    """
    numbers, index = torch.unique(samples, return_inverse=True)
    next_value, following = values.new_zeros(len(numbers)), values.new_zeros(len(numbers))
    advantages = torch.zeros_like(values)
    for step in reversed(_by_place(index)):  # the tokens at one position in all samples
        sample = index[step]
        delta = rewards[step] + gamma * next_value[sample] - values[step]
        advantages[step] = delta + gamma * lam * following[sample]
        next_value[sample], following[sample] = values[step], advantages[step]
    return advantages, advantages + values


def value_loss(
    predicted: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, *, clip: float | None = None
) -> torch.Tensor:
    """(V - R)^2 / 2, [n]. With `clip`, the larger of this and the same with V clipped to within `clip` of the `old`
    value.

    The clip is PPO's (Schulman et al. 2017, arXiv:1707.06347, as implemented).
    """
    squares = (predicted - returns) ** 2
    if clip is not None:
        within = torch.minimum(torch.maximum(predicted, old - clip), old + clip)
        squares = torch.maximum(squares, (within - returns) ** 2)
    return squares / 2


def _by_place(index: torch.Tensor) -> list[torch.Tensor]:
    """The first token of each sample, then the second of each, and so on."""
    order = index.argsort(stable=True)
    counts = torch.bincount(index)
    starts = counts.cumsum(0) - counts
    places = torch.empty_like(index)
    places[order] = torch.arange(len(index), device=index.device) - starts[index[order]]
    return [(places == place).nonzero().squeeze(-1) for place in range(int(places.max()) + 1 if len(index) else 0)]
