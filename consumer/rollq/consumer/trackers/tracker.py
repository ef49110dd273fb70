"""The interface of a tracker, and what is logged: the numbers of a step, and some of its rollouts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

UNTRACKED = {"step", "time_s", "workers", "by_worker", "by_version"}
"""Keys of a line of metrics that are left out: with them, each worker and each step would make new series."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sample that was trained: row of a table.

    `group` and `sample` are the id of its group and its index there. `parts` are the named terms of `reward`.
    `staleness`: of its oldest token, in train steps. Long texts are cut.
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
    """Writes entries somewhere. It is made, called and closed in one thread, and may raise anything, or hang."""

    def log(self, entry: Entry) -> None:
        """Write an entry. Steps grow, apart from an evaluation after its step."""

    def close(self) -> None:
        """Write what is left."""


def scalars(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers in a line of metrics, nested names joined by `/`."""
    for key, value in line.items():
        if key in UNTRACKED:
            continue
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}{key}", float(value)
