"""Per-sample numbers that are averaged over a step or an evaluation: reward parts, and the numbers that loops count."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rollq.buffer.values.rollouts import Sample, SampleStatus

Numbers = Mapping[str, tuple[float | None, ...]]
"""Name -> a number per sample, None for a sample without one."""

MOST_NAMES: Final = 16
MOST_CHARACTERS: Final = 64
"""The most names that a group has, and the longest: a claim carries all numbers. Reward parts are kept first."""
MOST: Final = 1e300
"""Larger numbers are left out, since a sum might overflow."""
OWN: Final = frozenset({"judge_s"})
"""Names of rollq's own numbers, which workers report."""


def sample_numbers(samples: Sequence[Sample]) -> Numbers:
    """The completed samples' numbers by name: `reward_parts`, and numbers in `extra`. Booleans become 0 or 1."""
    by_sample = [_numbers_of(sample) for sample in samples]
    parts = set[str]().union(*(sample.reward_parts for sample in samples))
    names = sorted(set[str]().union(*by_sample), key=lambda name: (name not in parts, name))
    return {name: tuple([numbers.get(name) for numbers in by_sample]) for name in names[:MOST_NAMES]}


def together(groups: Iterable[Numbers]) -> dict[str, tuple[float | None, ...]]:
    """Join several groups' numbers as if they were one group; a group that lacks a name adds no samples to it."""
    joined: dict[str, tuple[float | None, ...]] = {}
    for numbers in groups:
        for name, values in numbers.items():
            joined[name] = joined.get(name, ()) + values
    return joined


def means(numbers: Numbers) -> dict[str, float]:
    """The mean of each number over the samples that have it."""
    present = {name: [value for value in values if value is not None] for name, values in numbers.items()}
    return {name: sum(values) / len(values) for name, values in present.items() if values}


def _numbers_of(sample: Sample) -> dict[str, float]:
    if sample.status is not SampleStatus.COMPLETED or sample.reward is None:
        return {}
    given: dict[str, Any] = {**{name: sample.extra[name] for name in sample.extra.keys() - OWN}, **sample.reward_parts}
    return {name: float(value) for name, value in given.items() if len(name) <= MOST_CHARACTERS and _is_usable(value)}


def _is_usable(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < MOST and math.isfinite(value)
