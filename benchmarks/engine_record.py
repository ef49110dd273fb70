"""Reads the records of `benchmarks.saturating`. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One engine: the number of running sequences from each moment on, and the requested samples as `group/index`, in
    order of time."""

    running: tuple[tuple[float, int], ...]
    asked: tuple[tuple[float, str], ...]

    @classmethod
    def parse(cls, text: str) -> "EngineRecord":
        """Read a record. An incomplete last line comes from a killed worker, and is left out."""
        running, asked = [], []
        for line in text[: text.rfind("\n") + 1].splitlines():
            at_s, kind, value = line.split(" ")
            if kind == "running":
                running.append((float(at_s), int(value)))
            else:
                asked.append((float(at_s), value))
        # A start is written when the loop gets to it, an end with the time at which it was due.
        return cls(tuple(sorted(running, key=lambda each: each[0])), tuple(asked))

    def busy(self, start_s: float, end_s: float, slots: int) -> float:
        """The share of `slots` that had a sequence between two moments.

        >>> EngineRecord(((0.0, 2), (1.0, 4), (2.0, 9)), ()).busy(0.0, 4.0, 4)
        0.875
        """
        used = 0.0
        for (from_s, sequences), (to_s, _) in pairwise((*self.running, (end_s, 0))):
            used += max(0.0, min(to_s, end_s) - max(from_s, start_s)) * min(sequences, slots)
        return used / slots / (end_s - start_s)

    def first_start_s(self, after_s: float = 0.0) -> float | None:
        """The time when a sequence first ran after a moment; None if none ran."""
        return next((at_s for at_s, sequences in self.running if sequences and at_s >= after_s), None)


def busy_share(records: Sequence[EngineRecord], start_s: float, end_s: float, slots: int) -> float:
    """The share of busy slots of engines with `slots` each."""
    return sum(record.busy(start_s, end_s, slots) for record in records) / len(records)


def repeated_groups(records: Iterable[EngineRecord]) -> set[int]:
    """The groups with a sample that was requested more than once.

    >>> repeated_groups([EngineRecord((), ((0.0, "1/0"), (0.0, "2/0"))), EngineRecord((), ((1.0, "1/0"),))])
    {1}
    """
    asked = Counter(sample for record in records for _, sample in record.asked)
    return {group_of(sample) for sample, times in asked.items() if times > 1}


def group_of(sample: str) -> int:
    """The group of a sample `group/index`."""
    return int(sample.partition("/")[0])
