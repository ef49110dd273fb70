"""Results of benchmarks, and the arithmetic on repeated measurements."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Result:
    """One measured figure with its target. `values` are its repetitions; the verdict uses their median.

    `details` are further figures with the unit in their name; `profile_us` has the parts of one group's time.
    """

    name: str
    what: str
    unit: str
    target: float
    better: Literal["higher", "lower"]
    values: tuple[float, ...]
    details: Mapping[str, float] = field(default_factory=dict)
    profile_us: Mapping[str, float] = field(default_factory=dict)

    @property
    def measured(self) -> float:
        """The median of the repetitions."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile of the repetitions."""
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        first, _, third = statistics.quantiles(self.values, n=4, method="inclusive")
        return first, third

    @property
    def holds(self) -> bool:
        """Whether the median meets the target."""
        return self.measured >= self.target if self.better == "higher" else self.measured <= self.target


def take_turns(repetitions: int, *sides: Callable[[], float]) -> list[tuple[float, ...]]:
    """Measure every side once per repetition, in alternating order; returns the values of each side."""
    values: list[list[float]] = [[] for _ in sides]
    for repetition in range(repetitions):
        order = list(range(len(sides)))
        for index in reversed(order) if repetition % 2 else order:
            values[index].append(sides[index]())
    return [tuple(side) for side in values]


def ratios(of: Sequence[float], to: Sequence[float]) -> tuple[float, ...]:
    """The ratio of two sides in each repetition."""
    return tuple(value / reference for value, reference in zip(of, to, strict=True))
