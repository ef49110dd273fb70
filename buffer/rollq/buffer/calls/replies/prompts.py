"""The replies about prompts: their statistics, their record, and unused rows."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Admitted:
    """`count` prompts became groups, with ids from `first_id` up; the dataset's cursor is now `cursor`."""

    count: int
    first_id: int
    cursor: int


class PromptStats(NamedTuple):
    """One prompt's statistics, from its tries and its samples that have a reward.

    `pass_rate` (0 to 1), `mean_reward` and `mean_tokens` (per answer) are averages over the tries. The newest try has a
    weight of at least a quarter, because the policy changes. A try is a group that was finished and judged, with any
    outcome; an interrupted or expired group counts once it is finished again.
    """

    tries: int
    samples: int
    pass_rate: float
    mean_reward: float
    mean_tokens: float


class PromptRecord(NamedTuple):
    """A task's prompts: their file's digest, number of rows and path, and the seeds that order them.

    `revision` grows when the prompts change.
    """

    revision: int
    digest: str
    rows: int
    seeds: str
    path: str


class UnusableRow(NamedTuple):
    """An unusable prompt row: the reason, and the row's file and line."""

    row: int
    reason: str
    place: str


class ExcludedRows(NamedTuple):
    """The excluded rows of a task's prompts, and the number of rows excluded from another file."""

    rows: frozenset[int]
    of_another_file: int


@dataclass(frozen=True, slots=True)
class Unusable:
    """The number of rows that are unusable for one reason, and the location of the first such row."""

    rows: int
    first: str
