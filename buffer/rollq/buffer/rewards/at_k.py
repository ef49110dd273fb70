"""Estimates, without bias and from n samples, the results that k samples would have: pass@k, best@k and worst@k."""

from collections.abc import Iterator, Sequence
from math import comb


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The probability that one of k samples passes, if c = `passed` of n = `samples` did: 1 - C(n - c, k) / C(n, k).

    From Chen et al. 2021, arXiv:2107.03374. Raises `ValueError` unless 1 <= k <= n.
    """
    _check(samples, k)
    return 1 - comb(samples - passed, k) / comb(samples, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """The expected highest reward among k of these n rewards: the mean over all choices of k.

    The reward of rank i, from 1 for the lowest, is the highest in C(i - 1, k - 1) of C(n, k) choices: a share of k / n
    for the highest rank, and for rank i, (i - k + 1) / i times the share of rank i + 1. Raises `ValueError` unless
    1 <= k <= n.
    """
    _check(len(rewards), k)
    total, share = 0.0, k / len(rewards)
    for rank, reward in zip(range(len(rewards), k - 1, -1), sorted(rewards, reverse=True), strict=False):
        total += share * reward
        share *= (rank - k) / max(1, rank - 1)
    return total


def worst_at_k(rewards: Sequence[float], k: int) -> float:
    """The expected lowest reward among k of these n rewards. Raises `ValueError` unless 1 <= k <= n."""
    return -best_at_k([-reward for reward in rewards], k)


def sizes(samples: int) -> Iterator[int]:
    """The numbers k that are reported for n samples: powers of two, and n."""
    k = 1
    while k < samples:
        yield k
        k *= 2
    if samples:
        yield samples


def _check(samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k} of {samples} samples")
