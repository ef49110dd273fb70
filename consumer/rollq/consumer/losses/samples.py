"""Sums and means over the loss tokens of each sample, returned for every token. Pure functions of tensors.

`samples` int64 [n] gives each token's sample: equal numbers mean one sample, in any order, over all its segments.
"""

import torch


def sample_sums(values: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """For each token the sum of `values` [n] over its sample, [n]."""
    numbers, index = torch.unique(samples, return_inverse=True)
    return values.new_zeros(len(numbers)).index_add(0, index, values)[index]


def sample_means(values: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """For each token the mean of `values` [n] over its sample, [n]."""
    return sample_sums(values, samples) / sample_sums(torch.ones_like(values), samples)


def sample_maxima(values: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """For each token the largest of `values` [n] in its sample, [n]."""
    numbers, index = torch.unique(samples, return_inverse=True)
    return values.new_full((len(numbers),), -torch.inf).scatter_reduce(0, index, values, "amax")[index]
