"""Samples in parts, as a worker salvages them."""

from collections.abc import Iterator
from dataclasses import replace

from rollq.buffer.values.rollouts import Lease, Sample, SamplePart, Segment, VersionSpan
from rollq.buffer.wire.parts import join_parts, rest_of


def part(lease: Lease, number: int, sample: Sample, before: int = 0, index: int = 0) -> SamplePart:
    """The tokens of `sample` after the first `before`."""
    return SamplePart(lease, number, index, before, rest_of(sample, before))


def in_parts(lease: Lease, sample: Sample, *ends: int, index: int = 0, first: int = 0) -> Iterator[SamplePart]:
    """The sample in parts, which end after `ends` tokens. `first` is the number of earlier parts of its group."""
    for number, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        whole = join_parts([replace(sample, segments=(cut(sample.segments[0], end),))])
        yield part(lease, first + number, whole, start, index)


def cut(segment: Segment, tokens: int) -> Segment:
    """The first tokens of a segment of one version."""
    ((epoch, version, _),) = segment.versions
    return replace(
        segment,
        response_ids=segment.response_ids[:tokens],
        logprobs=segment.logprobs[:tokens],
        versions=(VersionSpan(epoch, version, tokens),),
    )
