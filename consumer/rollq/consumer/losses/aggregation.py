"""The weight of each token in the loss of a batch. Pure functions of tensors.

Invariant: the weight of a token depends only on counts of the whole batch, so the losses of micro-batches and ranks add
up. Tokens that a correction or a mask leaves out are counted.
"""

import torch

from rollq.consumer.batches.sequences import BatchCounts
from rollq.consumer.losses.kinds import Aggregation


def token_weights(
    sample_tokens: torch.Tensor, aggregation: Aggregation, *, tokens: int, samples: int, constant: int
) -> torch.Tensor:
    """The weight of each loss token in the batch's loss, [n]: the loss is the sum of weight * term.

    `sample_tokens` [n] counts the loss tokens in the token's sample, over all segments; `tokens` and `samples` count
    the whole batch over all ranks. `token`: 1 / tokens. `sequence`: 1 / (sample_tokens * samples). `constant`: 1 /
    (constant * samples).
    """
    match aggregation:
        case "token":
            return torch.full_like(sample_tokens, 1 / max(tokens, 1))
        case "sequence":
            return 1 / (sample_tokens * samples)
        case "constant":
            return torch.full_like(sample_tokens, 1 / (constant * max(samples, 1)))


def averaged_over(counts: BatchCounts, aggregation: Aggregation) -> int:
    """The number of tokens or samples over which the loss of a batch, or of a part, is a mean."""
    return counts.loss_tokens if aggregation == "token" else counts.samples
