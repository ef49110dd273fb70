"""Rows of numbers by train step, on the server and in files. Plain values.

The newest `FULL_ROWS` rows are all kept. Of the older rows, only every second, every fourth, and so on is kept, so that
at most `THINNED_ROWS` remain.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeVar

import orjson

from rollq.buffer.values.curves import as_number

FULL_ROWS: Final = 1000
THINNED_ROWS: Final = 4000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepRow:
    """A train step's numbers by name. `time_s` is the time of their report, in seconds since 1970."""

    step: int
    time_s: float
    numbers: Mapping[str, float]

    @classmethod
    def decode(cls, member: bytes, step: float) -> Self:
        """Decode a row that `report_trainer` wrote. Raises `ValueError` for anything else."""
        _, time_ms, numbers = member.split(b" ", 2)
        found = {
            name: number
            for name, value in dict(orjson.loads(numbers)).items()
            if (number := as_number(value)) is not None
        }
        return cls(int(step), int(time_ms) / 1000, found)


@dataclass(frozen=True, slots=True)
class StepRows:
    """A run's curves: `steps`, and the rewards of its `evaluations` by name; both in step order."""

    steps: tuple[StepRow, ...] = ()
    evaluations: tuple[StepRow, ...] = ()


def names_in(rows: Iterable[StepRow]) -> list[str]:
    """The names of the rows' numbers, sorted."""
    return sorted({name for row in rows for name in row.numbers})


def thinned(items: Sequence[T], most: int) -> Sequence[T]:
    """At most `most` of the items, evenly spread, including the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]
