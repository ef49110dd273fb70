"""A group's samples, field by field, so that training needs no object per sample."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import overload

from rollq.buffer.errors import InvalidGroup
from rollq.buffer.values.rollouts import FinishReason, Sample, SampleStatus, Segment


@dataclass(frozen=True, eq=False)
class Samples(Sequence[Sample]):
    """A group's samples. Each field has an entry per sample; `reasons` holds the finish reasons.

    As a sequence, it makes the `Sample` objects with `make` when they are first needed.
    """

    statuses: tuple[SampleStatus, ...]
    rewards: tuple[float | None, ...]
    reasons: tuple[FinishReason | None, ...]
    temperatures: tuple[float, ...]
    segments: tuple[tuple[Segment, ...], ...]
    make: "Callable[[Samples], tuple[Sample, ...]]"

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Samples":
        """The fields of `samples`. Raises `InvalidGroup` like `temperature_of`."""
        if isinstance(samples, Samples):
            return samples
        return cls(
            statuses=tuple([sample.status for sample in samples]),
            rewards=tuple([None if sample.reward is None else float(sample.reward) for sample in samples]),
            reasons=tuple([sample.finish_reason for sample in samples]),
            temperatures=tuple(map(temperature_of, samples)),
            segments=tuple([sample.segments for sample in samples]),
            make=partial(_given, tuple(samples)),
        )

    @cached_property
    def objects(self) -> tuple[Sample, ...]:
        """The samples themselves."""
        return self.make(self)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Sample, ...]: ...
    def __getitem__(self, index: int | slice) -> Sample | tuple[Sample, ...]:
        return self.objects[index]

    def __len__(self) -> int:
        return len(self.statuses)


def _given(objects: tuple[Sample, ...], _: Samples) -> tuple[Sample, ...]:
    return objects


def temperature_of(sample: Sample) -> float:
    """The temperature at which the sample was drawn: 1 unless `sampling` says otherwise. Raises `InvalidGroup` if the
    temperature is not a finite number, or `sampling` is not a mapping.
    """
    sampling = sample.sampling
    if not (type(sampling) is dict or isinstance(sampling, Mapping)):
        raise InvalidGroup(f"sampling is {sampling!r}, expected a mapping")
    temperature = sampling.get("temperature")
    try:
        number = 1.0 if temperature is None else float(temperature)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidGroup(f"sampling['temperature'] is {temperature!r}, expected a finite number")
    return number
