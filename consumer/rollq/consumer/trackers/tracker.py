"""The interface of a tracker, and its entries: the numbers of a step and some of its rollouts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

UNTRACKED = {"step", "time_s", "workers", "by_worker", "by_version"}
"""Keys of a metrics line that trackers leave out: `step` is the axis, trackers record the time anyway, and the others
would make a new series for each worker or version."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One trained sample: a row of a table.

    `group` is the sample's group id, and `sample` is its index in the group. `parts` holds the named terms of `reward`.
    `staleness` is its oldest token's staleness, in train steps. Long texts are cut.
    """

    task: str
    group: int
    sample: int
    prompt: str
    text: str
    reward: float
    parts: Mapping[str, float]
    advantage: float
    staleness: int
    tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One step to log; an evaluation has no rollouts."""

    step: int
    scalars: Mapping[str, float]
    rollouts: Sequence[Rollout] = ()


class Tracker(Protocol):
    """Writes entries somewhere. One thread makes, calls and closes it. It may raise any exception or hang."""

    def log(self, entry: Entry) -> None:
        """Write an entry. Steps increase, except that an evaluation follows its step."""

    def close(self) -> None:
        """Write the remaining entries."""


def scalars(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers in a metrics line, with nested names joined by `/`."""
    for key, value in line.items():
        if key in UNTRACKED:
            continue
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}{key}", float(value)
