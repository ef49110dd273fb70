"""The replies about tasks: their clocks, counts and archives."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.values.rollouts import Status


class Control(StrEnum):
    """The control of a task's production."""

    RUN = "run"
    PAUSE = "pause"  # nothing new is admitted or leased
    SLEEP = "sleep"  # like pause, while engines give their memory to the trainer; then the former control returns
    STOPPED = "stopped"  # like pause: too few groups are worth training, or all fail
    DONE = "done"  # nothing new is admitted: the task's hook ended production


@dataclass(frozen=True, slots=True)
class Clock:
    """A task's copy of the facts that its functions check.

    `step` is the train step that is trained next (from 1), `version` the live model version (`NO_VERSION` before the
    first trainer), `committed` the last trained step, `checkpoint` the last step that a checkpoint covers, `history`
    the oldest step to resume from. No step before `first_manifest` has a batch in this store. A rewind has undone steps
    beyond `claimed_step`, up to `undone`, so none of these can be resumed from. `rules_revision` counts the changes of
    `rules`, from 1.
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
    """The newest error of a task: of a try, or of a failed group. At most `MOST_ERROR_BYTES` of it are kept."""

    text: str
    age_s: float

    def __str__(self) -> str:
        return f"{self.text} ({self.age_s:,.0f} s ago)"


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of a task.

    `ready` counts completed groups that are fresh at the clock's step. `kept` of the last `outcomes` finished groups
    were worth training (the others were filtered or failed); at most `keep_window` are remembered. `last_error` is None
    before the first error.

    `progress` holds cumulative counters: cursor, admitted, consumed, produced, tokens, reward_sum, reward_count,
    expired, filtered, failed, requeued, refused, duplicates, and dropped_<reason> for groups that left; leased, groups
    that were leased for the first time, and queued_ms, their total wait since they were admitted; worked_ms, the total
    time of the attempts that were put; staleness, the sum over the trained groups of the staleness of each group's
    oldest token when it was claimed; outlived, deaths of workers with groups that were finished later; quarantined,
    groups that killed a worker that had no other group; lent, samples that workers have borrowed; not_reused, groups
    that were not kept for another use because memory was full. Two numbers may fall:
    failed_in_a_row, and bytes, the size of the frames of its groups now. The numbers of the prompts, rows, rows_read,
    rows_unusable and rows_too_long, start again when the prompts or the way they are read change.
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
        """Groups that have failed since the last group that did not fail."""
        return int(self.progress.get("failed_in_a_row", 0))

    @property
    def mean_bytes(self) -> float:
        """Average bytes of the frames of one of its groups; 0 without groups."""
        held = sum(self.statuses.get(status, 0) for status in WITH_SAMPLES)
        return self.progress.get("bytes", 0) / held if held else 0.0

    @property
    def expected_bytes(self) -> float:
        """Bytes of the frames of its groups, if unfinished groups will have the average size of the others."""
        on_their_way = sum(self.statuses.get(status, 0) for status in (Status.PENDING, Status.RUNNING))
        return self.progress.get("bytes", 0) + on_their_way * self.mean_bytes

    @property
    def dropped(self) -> Mapping[str, int]:
        """Groups that left the buffer, by reason (`trained` once a checkpoint covers them)."""
        return dropped_groups(self.progress)

    @property
    def failed_samples(self) -> Mapping[str, int]:
        """Failed samples of accepted attempts, by the value of their `FailureKind`, most frequent first."""
        failed = _named(self.progress, "failed_samples_")
        return dict(sorted(failed.items(), key=lambda item: (-item[1], item[0])))

    @property
    def unaccounted(self) -> int:
        """Admitted groups that are in no status set and under no drop counter. Anything but 0 is a bug."""
        return unaccounted_groups(self.progress, self.statuses)


WITH_SAMPLES = (
    Status.COMPLETED, Status.GATHERED, Status.COOLING, Status.CLAIMED, Status.ARCHIVED, Status.LEAVING,
    Status.FILTERED, Status.FAILED,
)  # fmt: skip
"""Statuses of groups whose samples have all ended and are kept."""


def dropped_groups(progress: Mapping[str, float]) -> dict[str, int]:
    """Groups that left the buffer, by reason (`trained` once a checkpoint covers them), from a task's counters."""
    return _named(progress, "dropped_")


def _named(progress: Mapping[str, float], prefix: str) -> dict[str, int]:
    """The counters whose names begin with `prefix`, by the rest of the name."""
    return {name.removeprefix(prefix): int(n) for name, n in progress.items() if name.startswith(prefix)}


def unaccounted_groups(progress: Mapping[str, float], statuses: Mapping[Any, int]) -> int:
    """Admitted groups of a task that are in no status set and under no drop counter. Anything but 0 is a bug."""
    return int(progress.get("admitted", 0)) - sum(statuses.values()) - sum(dropped_groups(progress).values())


@dataclass(frozen=True, slots=True)
class Production:
    """The production of a task between two calls. `timings_ms` are the times that the last 1000 groups took. `sums`
    count groups by where they were filed, new `tokens`, and `reward_sum` and `reward_count` before any filter.
    """

    seconds: float
    sums: Mapping[str, float]
    timings_ms: tuple[int, ...]


class ArchiveState(NamedTuple):
    """The archive of a task: its number of groups, seconds since the last file (None before the first file), why a live
    archiver cannot write the next file ('' if it can), and whether an archiver has taken groups lately."""

    groups: int
    age_s: float | None
    trouble: str
    is_alive: bool


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Groups that wait for a worker, and groups that workers hold."""

    pending: int
    running: int
