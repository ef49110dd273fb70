"""What a sample is, in a few bytes: worker and trainer record it, so that the checker can compare what they saw."""

import hashlib
from collections.abc import Iterable

from rollq.buffer.values.rollouts import NO_EPOCH, Sample


def samples_digest(samples: Iterable[Sample]) -> str:
    """A hash of tokens, logprobs, versions and rewards, which must survive the way from worker to trainer unchanged."""
    found = hashlib.sha256()
    for sample in samples:
        for segment in sample.segments:
            for array in (segment.prompt_ids, segment.response_ids, segment.logprobs):
                found.update(array.tobytes())
            found.update(repr([tuple(span) for span in segment.versions]).encode())
        found.update(repr((sample.status.value, sample.reward)).encode())
    return found.hexdigest()[:16]


def versions_of(samples: Iterable[Sample]) -> list[tuple[int, int]]:
    """Every (epoch, version) that made a token; none for what was inserted."""
    spans = (span for sample in samples for segment in sample.segments for span in segment.versions)
    return sorted({(span.epoch, span.version) for span in spans if span.epoch != NO_EPOCH})


def chained(before: str, digest: str) -> str:
    """The weights after a step: a hash of those before and of the batch, so that no two histories look the same."""
    return hashlib.sha256(f"{before} {digest}".encode()).hexdigest()[:16]
