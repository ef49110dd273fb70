"""Reads the status of a run as a plain value, from which views make text and JSON."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rq import Queue

from rollq.buffer.calls.evaluations import EvaluationState
from rollq.buffer.calls.replies.prompts import Unusable
from rollq.buffer.calls.replies.tasks import Counts, LastError
from rollq.buffer.calls.replies.trainer import LiveModel
from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import StoreLost
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.rules.batch_sizes import groups_at, groups_through, is_retired
from rollq.buffer.rules.shards import task_of
from rollq.buffer.store.connection import Patience
from rollq.buffer.tickets import jobs_by_registry, tickets_queued
from rollq.buffer.values.history import HistoryRow, SeenProducer
from rollq.buffer.values.memory_use import Fullness
from rollq.buffer.values.rollouts import SCHEDULED, Status
from rollq.buffer.values.trainer_state import TrainerPhase, TrainerState
from rollq.monitor.status.rates import Rates, rates

_left_out = LogOnce(logging.getLogger(__name__))

SILENT_WORKER_S = 5.0
"""Workers report each second."""
DEAD_WORKER_S = 30.0
FORGOTTEN_WORKER_S = 600.0
"""How long a dead worker is shown."""
FORGOTTEN_ERROR_S = 600.0
"""How long the last error of a task is shown."""
SILENT_TRAINER_S = 10.0
"""Trainers report each second."""
SILENT_PRODUCER_S = 10.0
"""Producers check each task at least every 2 seconds."""
RETIRED = "retired"
SERVING, IDLE = "serving", "idle"
"""States of a worker that takes groups: with and without groups in hand."""


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """The status of one task.

    `ready` counts completed groups that are fresh enough for `step`, whose batch takes `batch_groups`; `by_staleness`
    divides them by their staleness in training. Of all groups ever, `trained` are trained, `scheduled` are trained or
    on their way, and `limit` may be while the live `version` stays live; with the next published version,
    `next_version`, it grows. `statuses` counts groups by status, `bytes` counts their frames' bytes, and `progress`
    holds the task's cumulative counters. `kept` of the last `outcomes` finished groups were worth training; `dropped`
    counts groups that left, by reason. Ages are in seconds (see `Overview`); `producer_silent_s` is None if no producer
    was ever seen; `producers` holds the producers' places. `archive_trouble` says why an archiver cannot write, or is
    empty. `archives` says whether an archiver has taken groups lately. `last_error` is None if there was no error in
    the last 10 minutes. `unusable` says why prompt rows cannot be used; `excluded` counts rows taken out by hand.
    """

    task: str
    kind: str  # train or eval
    step: int  # trained next
    version: int  # of the live weights, -1 before the first trainer
    epoch: int
    control: str
    control_reason: str  # empty while production runs
    batch_groups: int
    stale_threshold: int
    group_size: int  # samples
    ready: int
    statuses: Mapping[str, int]
    bytes: Mapping[str, int] = field(default_factory=dict)
    progress: Mapping[str, float] = field(default_factory=dict)
    by_staleness: Mapping[int, int] = field(default_factory=dict)
    trained: int = 0
    scheduled: int = 0
    limit: int = 0
    next_version: int = 0
    outcomes: int = 0
    kept: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    failed_samples: Mapping[str, int] = field(default_factory=dict)  # so far, by the part that failed; most first
    pending_age_s: float | None = None
    running_age_s: float | None = None
    ready_age_s: float | None = None
    producer_silent_s: float | None = None
    producers: tuple[SeenProducer, ...] = ()
    archive_trouble: str = ""
    archives: bool = False
    last_error: LastError | None = None
    unusable: Mapping[str, Unusable] = field(default_factory=dict)
    excluded: int = 0
    rates: Rates | None = None
    offline: bool = False  # filled by insertions alone
    checkpoint: int = 0  # the last step that a checkpoint covers, 0 before the first
    is_retired: bool = False  # no batch takes its groups
    reward: float | None = None  # mean of its samples in the last trained step
    response_tokens: float | None = None  # mean of its trained samples in that step
    evaluation: EvaluationState | None = None  # of an evaluation, once it has a result

    @property
    def state(self) -> str:
        """The task's state in a word: retired, or its production's setting."""
        return RETIRED if self.is_retired else self.control

    @property
    def is_sampled(self) -> bool:
        """Whether batches take its groups and workers make them."""
        return self.is_trained and not self.offline

    @property
    def bound(self) -> str:
        """How many groups are on their way to the trainer, and the limit; "-" without a limit."""
        return "-" if self.offline else f"{self.scheduled - self.trained}/{self.limit - self.trained}"

    @property
    def is_evaluation(self) -> bool:
        """Whether the task only measures weights."""
        return self.kind == "eval"

    @property
    def is_trained(self) -> bool:
        """Whether batches take groups from it."""
        return self.kind == "train" and self.batch_groups > 0

    def groups(self, status: Status) -> int:
        """How many groups have a status."""
        return self.statuses.get(status.value, 0)


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run at `at_ms` of the server's clock.

    `tickets` counts tickets in the queue, and `jobs` counts RQ's executing, finished and failed tickets. `workers` maps
    each worker to its last report (see `completed_report`). `trainer` is the last trainer that took the run, with its
    state brought up to date.
    """

    run: str
    at_ms: int
    model: LiveModel | None
    tickets: int
    tasks: tuple[TaskStatus, ...]
    workers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    trainer: TrainerState | None = None
    fullness: Fullness = field(default_factory=Fullness)
    jobs: Mapping[str, int] = field(default_factory=dict)

    @property
    def alive_workers(self) -> Mapping[str, Mapping[str, Any]]:
        """Workers that have reported lately."""
        return {name: report for name, report in self.workers.items() if report["condition"] == "alive"}

    @property
    def task_list(self) -> list[TaskStatus]:
        """The tasks without the evaluations."""
        return [task for task in self.tasks if not task.is_evaluation]

    @property
    def is_trainer_waiting(self) -> bool:
        """Whether the trainer waits for a batch."""
        return self.trainer is not None and self.trainer.phase is TrainerPhase.WAITING


def groups_in(tasks: Iterable[TaskStatus], *statuses: Status) -> int:
    """How many groups of the tasks have one of the statuses."""
    return sum(task.groups(status) for task in tasks for status in statuses)


def read_status(buffer: MonitorBuffer, queue: Queue, patience: Patience | None = None) -> RunStatus:
    """Read the status of a run, without changing anything. Raises `StoreLost` if the server does not have the run.

    The work does not grow with the number of groups. `patience` is for the queue's server.
    """
    trainer = buffer.trainer_state()
    tasks = tuple(with_last_step(task, trainer) for task in _task_statuses(buffer))
    made = (trainer and trainer.report) or {}
    return RunStatus(
        run=buffer.run,
        at_ms=buffer.server_ms(),
        model=buffer.live_model(),
        tickets=tickets_queued(queue, patience=patience),
        tasks=tasks,
        workers={
            name: completed_report(report, batch_share(made, name))
            for name, report in buffer.workers(FORGOTTEN_WORKER_S).items()
        },
        trainer=brought_up_to_date(trainer, tasks),
        fullness=buffer.fullness(),
        jobs=jobs_by_registry(queue, patience=patience),
    )


def with_last_step(task: TaskStatus, trainer: TrainerState | None) -> TaskStatus:
    """A task with the means of its samples in the trainer's last step; a shard gets its task's means."""
    if trainer is None or task.is_evaluation:
        return task
    name = task_of(task.task)
    return replace(task, reward=trainer.rewards.get(name), response_tokens=trainer.response_tokens.get(name))


def completed_report(report: Mapping[str, Any], share: Mapping[str, float]) -> dict[str, Any]:
    """A worker's report with `age_s`, `condition` (alive, silent or dead) and, if the trainer reports it,
    `batch_share`, the worker's share of the last trained batch's samples.

    A worker that takes groups and has none is `idle`. A dead worker has no `tokens_per_s`.
    """
    found = {**report, "condition": condition(report["age_s"]), **share}
    if found.get("state") == SERVING and not found.get("in_flight") and not found.get("samples_in_flight"):
        found["state"] = IDLE
    if found["condition"] == "dead":
        found.pop("tokens_per_s", None)
    return found


def batch_share(report: Mapping[str, Any], worker: str) -> dict[str, float]:
    """A worker's share of the last batch's samples, from the trainer's report; empty if the report lacks it.

    The report names the workers with the most samples. Other workers made none, unless the report counts unnamed
    workers' samples.
    """
    named = report.get("workers")
    others, inserted = _counted(report, "other_samples"), _counted(report, "inserted_samples")
    if not isinstance(named, Mapping) or not all(isinstance(count, int) for count in named.values()):
        return {}
    samples = sum(named.values()) + others + inserted
    if not samples or (worker not in named and others):
        return {}
    return {"batch_share": round(named.get(worker, 0) / samples, 4)}


def _counted(report: Mapping[str, Any], name: str) -> int:
    return int(report.get(name) or 0)


def brought_up_to_date(trainer: TrainerState | None, tasks: Sequence[TaskStatus]) -> TrainerState | None:
    """A trainer's state, brought forward if its tasks show later steps than its last report.

    A trainer reports each second, so its last report may be a second and several steps old. The last report of a killed
    trainer stays old.
    """
    if trainer is None or trainer.has_ended:
        return trainer
    batched = [task for task in tasks if task.is_trained]
    if moved := _moved_on(trainer, batched):
        return moved
    return _with_ready(trainer, batched) if _still_waits(trainer) else trainer


def _still_waits(trainer: TrainerState) -> bool:
    return trainer.phase is TrainerPhase.WAITING and trainer.silent_s <= SILENT_TRAINER_S


def _with_ready(trainer: TrainerState, batched: Sequence[TaskStatus]) -> TrainerState:
    """A waiting trainer's state with the groups that are ready now, perhaps all that it waits for."""
    ready = {task.task: task.ready for task in batched}
    lacking = {task: wanted for task, wanted in trainer.wanted.items() if ready.get(task, 0) < wanted}
    if trainer.wanted and not any((lacking, trainer.stragglers, trainer.unarchived)):
        return replace(trainer, phase=TrainerPhase.TRAINING, for_s=trainer.silent_s)
    return replace(trainer, ready=ready, wanted=lacking)


def _moved_on(trainer: TrainerState, batched: Sequence[TaskStatus]) -> TrainerState | None:
    """The state of a trainer whose tasks are ahead of its last report; None for any other trainer."""
    step = max((task.step for task in batched), default=trainer.step)
    has_batch = any(task.groups(Status.CLAIMED) for task in batched if task.step == step)
    if not _is_behind(trainer, step, has_batch=has_batch):
        return None
    now, at = (TrainerPhase.TRAINING, step) if has_batch else (TrainerPhase.COMMITTED, step - 1)
    return replace(trainer, phase=now, step=at, for_s=trainer.silent_s)


def _is_behind(trainer: TrainerState, step: int, *, has_batch: bool) -> bool:
    phase = trainer.phase
    is_before = phase in (None, TrainerPhase.STARTING, TrainerPhase.WAITING, TrainerPhase.COMMITTED)
    least = step if phase in (TrainerPhase.WAITING, TrainerPhase.TRAINING) else step - 1
    return (phase is not None and trainer.step < least) or (has_batch and is_before)


def condition(age_s: float) -> str:
    """The condition of a worker whose last report has this age: alive, silent, or dead."""
    if age_s <= SILENT_WORKER_S:
        return "alive"
    return "silent" if age_s <= DEAD_WORKER_S else "dead"


def _task_statuses(buffer: MonitorBuffer) -> Iterator[TaskStatus]:
    """The statuses of the tasks. Raises `StoreLost` if the run is gone; a task that has a name but no clock is left
    out."""
    for task in buffer.tasks():
        try:
            yield _task_status(buffer, task)
        except StoreLost as error:
            if task not in buffer.tasks():
                continue
            _left_out.warning((buffer.run, task), "left out task %r, which has a name but no clock: %s", task, error)


def _task_status(buffer: MonitorBuffer, task: str) -> TaskStatus:
    counts, overview = buffer.counts(task), buffer.overview(task)
    clock, rules = counts.clock, counts.clock.rules
    interval, archive = rules.sync_weights_interval, buffer.archive_state(task)
    return TaskStatus(
        task=task,
        kind=rules.kind,
        step=clock.step,
        version=clock.version,
        epoch=clock.epoch,
        control=clock.control.value,
        control_reason=clock.control_reason,
        batch_groups=groups_at(rules.batch_groups, rules.schedule, clock.step),
        stale_threshold=rules.stale_threshold,
        group_size=rules.group_size,
        ready=counts.ready,
        statuses={status.value: counts.statuses.get(status, 0) for status in Status},
        bytes={status.value: taken for status, taken in buffer.bytes_by_status(counts).items()},
        progress=dict(sorted(counts.progress.items())),
        by_staleness={} if rules.offline else overview.by_staleness,
        trained=_through(counts, clock.committed),
        scheduled=_through(counts, clock.committed) + sum(counts.statuses.get(status, 0) for status in SCHEDULED),
        limit=_through(counts, max(0, clock.version + rules.stale_threshold)),
        next_version=(max(0, clock.version) // interval + 1) * interval,
        outcomes=counts.outcomes,
        kept=counts.kept,
        dropped=counts.dropped,
        failed_samples=counts.failed_samples,
        pending_age_s=overview.pending_age_s,
        running_age_s=overview.running_age_s,
        ready_age_s=overview.ready_age_s,
        producer_silent_s=overview.silent_s,
        producers=overview.producers,
        archive_trouble=archive.trouble,
        archives=archive.is_alive,
        last_error=_recent(counts.last_error),
        unusable=buffer.unusable_rows(task),
        excluded=len(buffer.excluded_rows(task).rows),
        rates=rates(overview.rows, _row_of(counts)),
        offline=rules.offline,
        checkpoint=clock.checkpoint,
        evaluation=buffer.evaluation(task) if rules.kind == "eval" else None,
        is_retired=rules.kind == "train" and is_retired(rules.batch_groups, rules.schedule, clock.step),
    )


def _recent(error: LastError | None) -> LastError | None:
    return error if error and error.age_s <= FORGOTTEN_ERROR_S else None


def _through(counts: Counts, step: int) -> int:
    rules = counts.clock.rules
    return groups_through(rules.batch_groups, rules.schedule, step)


def _row_of(counts: Counts) -> HistoryRow:
    clock = counts.clock
    return HistoryRow(counts.server_ms, clock.step, clock.version, counts.ready, counts.statuses, counts.progress)
