"""Means of numbers that may be missing. Pure."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def present(values: Iterable[T | None]) -> list[T]:
    """The values that are not None."""
    return [value for value in values if value is not None]


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are not None; None without any."""
    numbers = present(values)
    return sum(numbers) / len(numbers) if numbers else None
