"""The replies about tasks: their clocks, counts and archives."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.values.rollouts import Status


class Control(StrEnum):
    """Whether a task's production runs, pauses, sleeps, was stopped, or is done."""

    RUN = "run"
    PAUSE = "pause"  # nothing new is admitted or leased
    SLEEP = "sleep"  # like pause, while engines give their memory to the trainer; then the former control returns
    STOPPED = "stopped"  # like pause: too few groups are worth training, or all fail
    DONE = "done"  # nothing new is admitted: the task's hook ended production


@dataclass(frozen=True, slots=True)
class Clock:
    """A task's copy of the facts that its functions check.

    `step` is the next train step (from 1), `version` the live model version (`NO_VERSION` before the first trainer),
    `committed` the last trained step, `checkpoint` the last step that a checkpoint covers, and `history` the oldest
    step to resume from. No step before `first_manifest` has a batch in this store. A rewind has undone the steps beyond
    `claimed_step`, up to `undone`, so a run cannot resume from them. `rules_revision` counts changes of `rules`, from
    1.
    """

    incarnation: str
    epoch: int
    step: int
    version: int
    committed: int
    claimed_step: int
    checkpoint: int
    history: int
    first_manifest: int
    undone: int
    control: Control
    control_reason: str
    rules: TaskRules
    rules_revision: int
    floors: Floors


@dataclass(frozen=True, slots=True)
class LastError:
    """A task's newest error, from a try or a failed group, cut to `MOST_ERROR_BYTES`."""

    text: str
    age_s: float

    def __str__(self) -> str:
        return f"{self.text} ({self.age_s:,.0f} s ago)"


@dataclass(frozen=True, slots=True)
class Counts:
    """A task's counts.

    `ready` counts completed groups that are fresh at the clock's step. `kept` of the last `outcomes` finished groups
    were worth training (the others were filtered or failed); at most `keep_window` outcomes are remembered.
    `last_error` is None before the first error.

    `progress` holds cumulative counters: cursor, admitted, consumed, produced, tokens, reward_sum, reward_count,
    expired, filtered, failed, requeued, refused, duplicates, and dropped_<reason> for groups that left; leased, groups
    that were leased for the first time, and queued_ms, their total wait since admission; worked_ms, the total time of
    attempts that were put; staleness, the sum over trained groups of the staleness of their oldest token at the claim;
    outlived, deaths of workers whose groups were finished later; quarantined, groups that killed a worker that had no
    other group; lent, samples that workers have borrowed; not_reused, groups that were not kept for another use because
    memory was full. Three numbers may fall: failed_in_a_row; consumed, when a trainer goes back to an earlier step; and
    bytes, the current size of the task's frames. The prompt counters rows, rows_read, rows_unusable and rows_too_long
    restart when the prompts or the way they are read change.
    """

    task: str
    clock: Clock
    statuses: Mapping[Status, int]
    ready: int
    outcomes: int
    kept: int
    progress: Mapping[str, float]
    server_ms: int
    last_error: LastError | None = None

    @property
    def failed_in_a_row(self) -> int:
        """The number of groups that have failed since the last group that did not."""
        return int(self.progress.get("failed_in_a_row", 0))

    @property
    def mean_bytes(self) -> float:
        """Average frame bytes per group; 0 without groups."""
        held = sum(self.statuses.get(status, 0) for status in WITH_SAMPLES)
        return self.progress.get("bytes", 0) / held if held else 0.0

    @property
    def expected_bytes(self) -> float:
        """Frame bytes of all groups, if unfinished groups will have the other groups' average size."""
        on_their_way = sum(self.statuses.get(status, 0) for status in (Status.PENDING, Status.RUNNING))
        return self.progress.get("bytes", 0) + on_their_way * self.mean_bytes

    @property
    def dropped(self) -> Mapping[str, int]:
        """Groups that left the buffer, by reason (`trained` once a checkpoint covers them)."""
        return dropped_groups(self.progress)

    @property
    def failed_samples(self) -> Mapping[str, int]:
        """Failed samples in accepted attempts, by `FailureKind` value, most frequent first."""
        failed = _named(self.progress, "failed_samples_")
        return dict(sorted(failed.items(), key=lambda item: (-item[1], item[0])))

    @property
    def unaccounted(self) -> int:
        """Admitted groups in no status set and no drop counter. Anything but 0 is a bug."""
        return unaccounted_groups(self.progress, self.statuses)


WITH_SAMPLES = (
    Status.COMPLETED, Status.GATHERED, Status.COOLING, Status.CLAIMED, Status.ARCHIVED, Status.LEAVING,
    Status.FILTERED, Status.FAILED,
)  # fmt: skip
"""Statuses of groups whose samples have all ended and are still stored."""


def dropped_groups(progress: Mapping[str, float]) -> dict[str, int]:
    """From a task's counters, the groups that left the buffer, by reason (`trained` once a checkpoint covers them)."""
    return _named(progress, "dropped_")


def _named(progress: Mapping[str, float], prefix: str) -> dict[str, int]:
    """The counters whose names begin with `prefix`, by the rest of the name."""
    return {name.removeprefix(prefix): int(n) for name, n in progress.items() if name.startswith(prefix)}


def unaccounted_groups(progress: Mapping[str, float], statuses: Mapping[Any, int]) -> int:
    """A task's admitted groups in no status set and no drop counter. Anything but 0 is a bug."""
    return int(progress.get("admitted", 0)) - sum(statuses.values()) - sum(dropped_groups(progress).values())


@dataclass(frozen=True, slots=True)
class Production:
    """A task's production between two calls. `timings_ms` holds the times that the last 1000 groups took. `sums` counts
    groups by where they were filed, and holds new `tokens`, and `reward_sum` and `reward_count` before any filter.
    """

    seconds: float
    sums: Mapping[str, float]
    timings_ms: tuple[int, ...]


class ArchiveState(NamedTuple):
    """The state of a task's archive: its number of groups, the seconds since its last file (None before the first), why
    a live archiver cannot write the next file ('' if it can), and whether an archiver has taken groups lately."""

    groups: int
    age_s: float | None
    trouble: str
    is_alive: bool


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Groups that wait for a worker, and groups that workers hold."""

    pending: int
    running: int
