"""Version spans from the token indices at which the weights changed."""

from collections.abc import Sequence
from itertools import pairwise

from rollq.buffer.values.rollouts import VersionSpan
from rollq.workers.engines.protocol import WeightsVersion


def version_spans(starts: Sequence[tuple[WeightsVersion, int]], tokens: int) -> tuple[VersionSpan, ...]:
    """The spans over `tokens` tokens. `starts` holds pairs (version, index of its first token), in order, from index 0;
    starts after the last token are ignored.

    >>> version_spans([(WeightsVersion(1, 4, ""), 0), (WeightsVersion(1, 5, ""), 2)], 3)
    (VersionSpan(epoch=1, version=4, tokens=2), VersionSpan(epoch=1, version=5, tokens=1))
    """
    ends = [*(min(first, tokens) for _, first in starts), tokens]
    return tuple(
        VersionSpan(version.epoch, version.version, end - first)
        for (version, _), (first, end) in zip(starts, pairwise(ends), strict=False)
        if end > first
    )
