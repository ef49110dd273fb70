"""The replies about prompts: their statistics, their record, and rows that are not used."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Admitted:
    """`count` prompts became groups `first_id` and up; the dataset's cursor is now `cursor`."""

    count: int
    first_id: int
    cursor: int


class PromptStats(NamedTuple):
    """Statistics of one prompt: its tries, and its samples that have a reward.

    `pass_rate` (0 to 1), `mean_reward` and `mean_tokens` (of an answer) are averages over the tries. The newest try
    weighs a quarter or more, because the policy changes. A try is a group that was finished and judged, with any
    outcome; a group that is interrupted or expires counts when it is finished again.
    """

    tries: int
    samples: int
    pass_rate: float
    mean_reward: float
    mean_tokens: float


class PromptRecord(NamedTuple):
    """The prompts that a task has: the digest of their file, its rows and path, and the seeds of their order.

    `revision` counts up when they change.
    """

    revision: int
    digest: str
    rows: int
    seeds: str
    path: str


class UnusableRow(NamedTuple):
    """A row of prompts that cannot be used, why, and where it is: its file and line."""

    row: int
    reason: str
    place: str


class ExcludedRows(NamedTuple):
    """Rows of a task's prompts that were taken out by hand, and how many others were taken out of another file."""

    rows: frozenset[int]
    of_another_file: int


@dataclass(frozen=True, slots=True)
class Unusable:
    """How many rows are unusable for one reason, and where the first of them is."""

    rows: int
    first: str
