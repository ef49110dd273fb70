"""The replies of the buffer: frozen values, one per question."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.values.rollouts import Lease, PipelineOutput, Status


class Control(StrEnum):
    """Whether a task is produced."""

    RUN = "run"
    PAUSE = "pause"  # nothing new is admitted or leased
    SLEEP = "sleep"  # like pause, and engines give their memory to the trainer; then it is again what it was
    STOPPED = "stopped"  # like pause: too little of what is made is worth training, or all of it fails
    DONE = "done"  # nothing new is admitted: the task's own hook has ended its production


@dataclass(frozen=True, slots=True)
class Clock:
    """A task's copy of what its functions check.

    `step` is the train step that is trained next (from 1), `version` the live model version (`NO_VERSION` before the
    first trainer), `committed` the last trained step, `checkpoint` the last one that a checkpoint covers, `history` the
    oldest step to resume from. No step before `first_manifest` has a batch in this store. Steps beyond `claimed_step`,
    up to `undone`, cannot be resumed from: a rewind has undone them. `rules_revision` counts the changes of `rules`,
    from 1.
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
    """The newest error of a task: of a try, or of a group that failed. At most `MOST_ERROR_BYTES` of it are kept."""

    text: str
    age_s: float

    def __str__(self) -> str:
        return f"{self.text} ({self.age_s:,.0f} s ago)"


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of a task.

    `ready`: completed groups that are fresh at the clock's step. `kept` of the last `outcomes` finished groups were
    worth training (the others were filtered or failed); at most `keep_window` are remembered. `last_error`: None before
    the first one.

    `progress` holds cumulative counters: cursor, admitted, consumed, produced, tokens, reward_sum, reward_count,
    expired, filtered, failed, requeued, refused, duplicates, and dropped_<reason> for groups that left; leased, groups
    that were leased for the first time, and queued_ms, their total wait since they were admitted; worked_ms, the total
    time of the attempts that were put; staleness, the sum over the trained groups of the staleness of each group's
    oldest token when it was claimed; outlived, deaths of workers with groups that were finished later; quarantined,
    groups that killed a worker that had no other group; lent, samples that workers have borrowed. Two numbers may fall:
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
        """Groups that failed since one ended in another way."""
        return int(self.progress.get("failed_in_a_row", 0))

    @property
    def mean_bytes(self) -> float:
        """Bytes of the frames of one of its groups on average; 0 without any."""
        held = sum(self.statuses.get(status, 0) for status in WITH_SAMPLES)
        return self.progress.get("bytes", 0) / held if held else 0.0

    @property
    def expected_bytes(self) -> float:
        """Bytes of the frames of its groups, when those on their way are as large as the others are on average."""
        on_their_way = sum(self.statuses.get(status, 0) for status in (Status.PENDING, Status.RUNNING))
        return self.progress.get("bytes", 0) + on_their_way * self.mean_bytes

    @property
    def dropped(self) -> Mapping[str, int]:
        """Groups that left the buffer, by reason (`trained` once a checkpoint covers them)."""
        return dropped_groups(self.progress)

    @property
    def failed_samples(self) -> Mapping[str, int]:
        """Samples that failed in attempts that were accepted, by the value of their `FailureKind`; most first."""
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
    """The production of a task between two calls. `timings_ms`: how long groups took, the last 1000 of them.

    `sums`: groups by where they were filed, `tokens` (new ones), `reward_sum` and `reward_count` before any filter.
    """

    seconds: float
    sums: Mapping[str, float]
    timings_ms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LiveModel:
    """The weights that workers should serve.

    `awaited`: the digests of later versions that its trainer, which replays recorded batches, may publish again.
    """

    epoch: int
    version: int
    digest: str
    uri: str
    awaited: Mapping[int, str] = field(default_factory=dict)

    def awaits(self, epoch: int, version: int, digest: str) -> bool:
        """Whether its trainer may publish these weights again: an engine that has them may keep them until then."""
        return epoch < self.epoch and version > self.version and self.awaited.get(version) == digest


@dataclass(frozen=True, slots=True)
class Admitted:
    """`count` prompts became groups `first_id` and up; the dataset's cursor is now `cursor`."""

    count: int
    first_id: int
    cursor: int


@dataclass(frozen=True, slots=True)
class BatchState:
    """A batch of groups that is gathered as a whole; `handle` names this incarnation of `batch_id`.

    `state`: running, finalizing, finalized or aborted. `size`: its groups so far; with `closed`, its final number.
    `gathered`, `filtered`, `failed`: its groups that are finished; `left`: groups that left it unfinished when it was
    cut off. `epoch`, `version`: the live weights when it began.
    """

    batch_id: str
    handle: str
    state: str
    kind: str
    step: int
    epoch: int
    version: int
    size: int
    closed: bool
    gathered: int
    filtered: int
    failed: int
    left: int

    @property
    def complete(self) -> bool:
        """Whether every group of it is finished, or has left it."""
        return self.closed and self.gathered + self.filtered + self.failed + self.left >= self.size


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


class Reaped(NamedTuple):
    """Leases past their deadline: sent back, or quarantined. `held`: nobody is judged just after an outage."""

    requeued: int
    quarantined: int
    held: bool


class ArchiveState(NamedTuple):
    """The archive of a task: groups that it has, seconds since the last file (None before the first one), why an
    archiver that is alive cannot write the next one ('' if it can), and whether one has lately taken groups."""

    groups: int
    age_s: float | None
    trouble: str
    is_alive: bool


class Leased(NamedTuple):
    """The leases a worker got. `drain`: finish the groups in hand, then lease again, since a suspect must run alone."""

    leases: tuple[Lease, ...]
    drain: bool


class Renewed(NamedTuple):
    """Leases that are no longer the caller's, and held ones of batches that wait for nothing more: of those, what is
    finished counts, see `Coordination.cut_off`."""

    gone: list[Lease]
    cut_off: list[Lease]


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Groups that wait for a worker, and groups that workers hold."""

    pending: int
    running: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Samples of a leased group to be `added` to those that are offered to other workers, or `taken_back`, by index.

    `number`: how many calls for this lease came before this one, of those that added some or took some back.
    """

    lease: Lease
    number: int
    added: tuple[int, ...] = ()
    taken_back: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Offered:
    """The samples of a leased group that are offered to other workers, and those that are lent to one, by index.

    `parts`: how many parts of its samples the buffer has.
    """

    offered: frozenset[int]
    lent: frozenset[int]
    parts: int = 0


class PutOutcome(StrEnum):
    """Where a result was filed."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FILTERED = "filtered"
    FAILED = "failed"
    DROPPED = "dropped"  # too stale, and the task drops what expires
    DUPLICATE = "duplicate"  # this very result is in already
    REFUSED = "refused"  # the lease is no longer the caller's
    GATHERED = "gathered"  # finished, for its batch
    RESTARTED = "restarted"  # its batch still needs it: pending again


class SalvageOutcome(StrEnum):
    """Whether a part of a sample was kept. If one is not, neither is any later part of its lease."""

    KEPT = "kept"
    FULL = "full"  # the group has `MOST_PARTS` or `MOST_PART_BYTES`
    REFUSED = "refused"  # the lease is no longer the caller's, or an earlier part is missing


@dataclass(frozen=True, slots=True)
class TrainerEpoch:
    """A trainer's hold of the run: the fencing token of its calls. `from_step` is the step of its checkpoint; later
    batches, up to step `replayed_through`, are served as they were recorded."""

    epoch: int
    nonce: str
    from_step: int
    trainer_id: str
    launch_id: str
    replayed_through: int = 0


class ClaimedGroup(NamedTuple):
    """One group of a claimed batch, without its samples. `tokens`: response tokens; `reward`: mean over samples;
    `payload`: the name of the key that holds their frame, '' when it is in the group's rollout; `nonce`: of the lease
    that made them; `rows`: see `rollq.buffer.wire.sample_rows`."""

    task: str
    group_id: int
    oldest_version: int
    arrival: int
    tries: int
    tokens: int
    reward: float
    payload: str = ""
    nonce: str = ""
    rows: bytes = b""
    shaped: PipelineOutput | None = None


class Finalizing(NamedTuple):
    """The progress of ending a batch. `finalizing`: it is the caller's, with its finished groups; `busy`: another has
    it; `finalized` or `aborted`: it has ended, with its `result` (JSON, or the reason)."""

    state: str
    result: bytes
    groups: tuple[ClaimedGroup, ...] = ()


class Counting(NamedTuple):
    """How old the tokens of a claimed group are.

    Tokens of dead epochs count as `floors` says. Tokens with a staleness of `token_threshold` or more are masked.
    """

    floors: Floors
    token_threshold: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """The batch of a step; every call for the step gives the same one, until it is released.

    `counting` has one entry for each group, of the group's first claim: its tokens stay as old as they were then.
    `claim_round` names this claim for its release; `releases`: how often the step was released before, in this epoch.

    While the batch fills, `lack` says what it lacks yet: later calls return the same groups and further ones. `parts`
    are the ends of the parts that it was divided into, as numbers of groups, and the groups are in the order of the
    parts; see `Claiming.divide`, to which `plan_round` belongs. `planned` are the groups per task when it is whole.
    """

    step: int
    groups: tuple[ClaimedGroup, ...]
    counting: tuple[Counting, ...]
    claim_round: int
    releases: int
    planned: Mapping[str, int]
    parts: tuple[int, ...] = ()
    plan_round: int = 0
    lack: "Shortfall | None" = None


class Readiness(NamedTuple):
    """The groups of a task for a claim of a step.

    They are the completed groups that are fresh at it; the groups in generation that it waits for, because they would
    be too old at the next step; and the groups that must reach the archive first.
    """

    ready: int
    stragglers: int
    unarchived: int


@dataclass(frozen=True, slots=True)
class Shortfall:
    """No batch yet: per task that is short, how many groups are ready, how many are wanted, how many in generation
    would be too old at the next step and are waited for, and how many must reach the archive first. With no task short,
    the last batch is being released."""

    step: int
    ready: Mapping[str, int]
    wanted: Mapping[str, int]
    stragglers: Mapping[str, int] = field(default_factory=dict)
    unarchived: Mapping[str, int] = field(default_factory=dict)
