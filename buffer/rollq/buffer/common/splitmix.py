"""SplitMix64 (Steele, Lea, Flood 2014): hashes of 64-bit integers that are the same on every machine and version.

numpy does not keep its generators' streams stable across versions; integer arithmetic never changes.
"""

import numpy as np
import numpy.typing as npt

GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The next output of SplitMix64 for each state in `x`, uint64 [N]: a bijection that looks random."""
    x = x + np.uint64(GOLDEN_GAMMA)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
