"""A run's metrics, in order of output, each with a function that reads its value from a `RunStatus`. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.values.curves import LINES, Line, labels_of, numbers_of
from rollq.buffer.values.rollouts import Status
from rollq.buffer.values.trainer_state import TrainerPhase, TrainerState
from rollq.monitor.status.diagnosis import State, diagnose
from rollq.monitor.status.prompt_rows import PromptRows
from rollq.monitor.status.read import RunStatus, TaskStatus
from rollq.monitor.status.wanted_workers import wanted_workers

Values = Iterable[tuple[tuple[str, ...], float]]
"""Pairs of a metric's label values and its value."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Its labels are `run`, and then `labels`; a counter only grows, and its name ends with `_total`."""

    name: str
    text: str
    labels: tuple[str, ...]
    read: Callable[[RunStatus], Values]

    @property
    def is_counter(self) -> bool:
        """Whether the metric is a counter rather than a gauge."""
        return self.name.endswith("_total")


def _of_run(name: str, text: str, value: Callable[[RunStatus], float | None]) -> Metric:
    """A metric with one value, or none."""

    def read(run: RunStatus) -> Iterator[tuple[tuple[str, ...], float]]:
        if (number := value(run)) is not None:
            yield (), float(number)

    return Metric(name, text, (), read)


def _of_trainer(name: str, text: str, value: Callable[[TrainerState], float | None]) -> Metric:
    return _of_run(name, text, lambda run: None if run.trainer is None else value(run.trainer))


def _of_tasks(name: str, text: str, value: Callable[[TaskStatus], float | None]) -> Metric:
    """A metric with a value for each task that has one."""
    return Metric(
        name,
        text,
        ("task",),
        lambda run: [((task.task,), float(number)) for task in run.tasks if (number := value(task)) is not None],
    )


def _in_tasks(name: str, text: str, label: str, values: Callable[[TaskStatus], Mapping[Any, float | None]]) -> Metric:
    """A metric with values for each task, by another label."""
    return Metric(
        name,
        text,
        ("task", label),
        lambda run: [
            ((task.task, str(key)), float(value))
            for task in run.tasks
            for key, value in values(task).items()
            if value is not None
        ],
    )


def _counted(name: str, text: str, counter: str, unit: float = 1.0) -> Metric:
    """A cumulative counter of a task's progress, in multiples of `unit`."""
    return _of_tasks(name, text, lambda task: task.progress.get(counter, 0) * unit)


def _of_workers(name: str, text: str, field: str) -> Metric:
    """A field of the workers' reports, for workers that report a number in it."""
    return Metric(
        name,
        text,
        ("worker",),
        lambda run: [
            ((worker,), float(report[field]))
            for worker, report in run.workers.items()
            if isinstance(report.get(field), int | float)
        ],
    )


def _one_of(names: Iterable[StrEnum], present: str | None) -> dict[str, float]:
    """1 for the `present` name, 0 for the others."""
    return {name.value: float(name.value == present) for name in names}


def _states(run: RunStatus) -> Values:
    return [((state,), on) for state, on in _one_of(State, diagnose(run).state.value).items()]


def _phases(run: RunStatus) -> Values:
    if run.trainer is None:
        return []
    return [((phase,), on) for phase, on in _one_of(TrainerPhase, run.trainer.phase).items()]


def _workers_by_condition(run: RunStatus) -> Values:
    conditions = [report["condition"] for report in run.workers.values()]
    return [((condition,), conditions.count(condition)) for condition in ("alive", "silent", "dead")]


def _trained(line: Line) -> Metric:
    """A number of the last trained batch, from the trainer's report; see `numbers_of`."""

    def read(run: RunStatus) -> Values:
        numbers = numbers_of((run.trainer and run.trainer.report) or {})
        found = ((labels_of(name, line), number) for name, number in numbers.items())
        return [(labels, number) for labels, number in found if labels is not None]

    text = line.text.replace("`", "")
    return Metric(
        line.metric, f"{text[0].upper()}{text[1:]}; of the last batch", ("task", "part")[: line.keys.count("*")], read
    )


def _evaluated(run: RunStatus) -> Values:
    states = ((task.task, task.evaluation) for task in run.tasks)
    return [((task,), state.reward) for task, state in states if state and state.reward is not None]


def _ages(task: TaskStatus) -> dict[str, float | None]:
    return {"pending": task.pending_age_s, "running": task.running_age_s, "completed": task.ready_age_s}


def _rows(task: TaskStatus) -> dict[str, float | None]:
    rows = PromptRows.counted(task.progress)
    return {} if rows is None else {"all" if name == "rows" else name: count for name, count in rows._asdict().items()}


METRICS = (
    Metric("rollq_state", "1 for the state of the diagnosis, 0 for the others", ("state",), _states),
    _of_run("rollq_model_version", "Train step after which the live weights were published",
            lambda run: run.model.version if run.model else None),
    _of_run("rollq_epoch", "Number of the trainer's epoch; it grows with each start",
            lambda run: run.model.epoch if run.model else None),
    _of_run("rollq_tickets", "Tickets in the queue, which wait for a worker", lambda run: run.tickets),
    _of_run("rollq_memory_used_ratio", "Used share of maxmemory, or of max_buffer_bytes; from 0.8, admission stops",
            lambda run: run.fullness.share),
    Metric("rollq_workers", "Workers that have reported in the last 10 minutes", ("condition",),
           _workers_by_condition),
    _of_run("rollq_wanted_workers", "Workers needed so that the trainer does not wait; absent while unknown",
            wanted_workers),

    Metric("rollq_trainer_phase", "1 for the trainer's phase, 0 for the others", ("phase",), _phases),
    _of_trainer("rollq_trainer_phase_seconds", "Time in the current phase", lambda trainer: trainer.for_s),
    _of_trainer("rollq_trainer_silent_seconds", "Time since the trainer reported", lambda trainer: trainer.silent_s),
    _of_trainer("rollq_trainer_lease_seconds", "Time until the trainer's lease on the run ends",
                lambda trainer: trainer.lease_left_s),
    _of_trainer("rollq_trainer_step", "Current train step of the trainer", lambda trainer: trainer.step),
    _of_trainer("rollq_trainer_busy_seconds", "Mean time of the last 10 steps, without the wait",
                lambda trainer: trainer.busy_s),
    _of_trainer("rollq_trainer_waited_seconds", "Mean wait for a batch, over the last 10 steps",
                lambda trainer: trainer.waited_s),
    *map(_trained, LINES),
    Metric("rollq_evaluated_reward", "Mean reward of the last result of an evaluation", ("evaluation",), _evaluated),

    _of_tasks("rollq_step", "Train step that is trained next", lambda task: task.step),
    _in_tasks("rollq_control", "1 for the control of the task's production, 0 for the others", "control",
              lambda task: _one_of(Control, task.control)),
    _in_tasks("rollq_groups", "Groups by status", "status",
              lambda task: {status.value: task.groups(status) for status in Status}),
    _of_tasks("rollq_ready_groups", "Completed groups that are fresh enough for the next batch",
              lambda task: task.ready),
    _of_tasks("rollq_batch_groups", "Groups that the next batch takes", lambda task: task.batch_groups),
    _in_tasks("rollq_stale_groups", "Ready groups by the staleness that they would be trained with", "staleness",
              lambda task: task.by_staleness),
    _of_tasks("rollq_trained_groups", "Groups that are trained; it falls when a trainer resumes from a checkpoint",
              lambda task: task.trained),
    _of_tasks("rollq_scheduled_groups", "Groups that are trained, or on the way to the trainer",
              lambda task: task.scheduled),
    _of_tasks("rollq_allowed_groups", "Most groups that the staleness bound allows with the live weights",
              lambda task: None if task.offline else task.limit),
    _of_tasks("rollq_kept_ratio", "Share of the last finished groups that were worth training",
              lambda task: task.kept / task.outcomes if task.outcomes else None),
    _in_tasks("rollq_prompt_rows", "Rows of the prompt file: all, read, used, unusable and too long",
              "rows", _rows),
    _in_tasks("rollq_samples_bytes", "Memory of samples by the status of their group", "status",
              lambda task: task.bytes),
    _in_tasks("rollq_oldest_group_seconds", "Age of the oldest group: since admission, lease, or put", "status",
              _ages),
    _of_tasks("rollq_waited_seconds", "Mean time over the last minute that a group waited for the trainer",
              lambda task: task.rates.waited_s if task.rates else None),
    _of_tasks("rollq_producer_silent_seconds", "Time since a producer looked at the task; absent before the first one",
              lambda task: task.producer_silent_s),
    _of_tasks("rollq_last_error_seconds", "Age of the newest error of a try or a group",
              lambda task: task.last_error.age_s if task.last_error else None),
    _counted("rollq_admitted_groups_total", "Groups that were admitted", "admitted"),
    _counted("rollq_inserted_groups_total", "Admitted groups that were inserted", "inserted"),
    _counted("rollq_leased_groups_total", "Groups that were leased for the first time", "leased"),
    _counted("rollq_queued_seconds_total", "Time from admission to the first lease, over these groups", "queued_ms",
             0.001),
    _counted("rollq_attempts_total", "Attempts put by workers", "produced"),
    _counted("rollq_worked_seconds_total", "Time with a worker, over these attempts", "worked_ms", 0.001),
    _counted("rollq_tokens_total", "New tokens of these attempts", "tokens"),
    _counted("rollq_expired_groups_total", "Groups that became too stale", "expired"),
    _counted("rollq_filtered_groups_total", "Groups that were not worth training", "filtered"),
    _counted("rollq_failed_groups_total", "Groups that failed", "failed"),
    _in_tasks("rollq_failed_samples_total", "Samples that failed, by the part that failed", "kind",
              lambda task: task.failed_samples),
    _counted("rollq_requeued_groups_total", "Leases that ran out", "requeued"),
    _counted("rollq_lent_samples_total", "Samples that workers have borrowed from each other", "lent"),
    _counted("rollq_not_reused_groups_total", "Groups not kept for another use because memory was full", "not_reused"),
    _counted("rollq_refused_results_total", "Results of leases that had ended", "refused"),
    _in_tasks("rollq_dropped_groups_total", "Groups that left, by reason; `trained` once a checkpoint covers them",
              "reason", lambda task: task.dropped),

    _of_workers("rollq_worker_report_age_seconds", "Time since the worker's last report", "age_s"),
    _of_workers("rollq_worker_version", "Version of the worker's weights; -1 if it has none", "version"),
    _of_workers("rollq_worker_groups", "Groups that the worker holds", "in_flight"),
    _of_workers("rollq_worker_samples_in_flight", "Samples that the worker generates now", "samples_in_flight"),
    _of_workers("rollq_worker_capacity_samples", "Most samples that the worker generates at a time", "capacity"),
    _of_workers("rollq_worker_batch_ratio", "The worker's share of the samples of the last trained batch",
                "batch_share"),
    _of_workers("rollq_worker_tokens_per_second", "New tokens a second, over the last minute", "tokens_per_s"),
    _of_workers("rollq_worker_generate_seconds", "Mean time of a sample in its loop, over the last minute",
                "generate_s"),
    _of_workers("rollq_worker_judge_seconds", "Mean time of a sample at its judge, over the last minute", "judge_s"),
    _of_workers("rollq_worker_unrewarded_ratio", "Share of judged samples whose judge failed, over the last minute",
                "unrewarded"),
    _of_workers("rollq_worker_swaps_total", "Changes of weights since the worker started", "swaps"),
    _of_workers("rollq_worker_swap_pause_seconds_total", "Pauses of the engine for these changes", "swap_pause_s"),
    _of_workers("rollq_worker_finished_groups_total", "Groups that the worker has finished", "groups"),
    _of_workers("rollq_worker_samples_total", "Samples that the worker has finished", "samples"),
    _of_workers("rollq_worker_failed_samples_total", "Finished samples that failed", "failed_samples"),
    _of_workers("rollq_worker_refused_outcomes_total", "Rewards of programs without their token, at the gateway",
                "refused_outcomes"),
    _of_workers("rollq_worker_recomputed_tokens_total", "Tokens whose cache was recomputed", "recomputed_tokens"),
)  # fmt: skip
"""All metrics except the two below. Series without a value are absent."""

UP = Metric(
    "rollq_up", "1 if the run was read, 0 if its server does not answer or does not have it", (), lambda _: [((), 1.0)]
)
CALLS = Metric(
    "rollq_on_change_calls_total", "Calls of the command `on_change` by this process, if one is set", ("outcome",),
    lambda _: [],
)  # fmt: skip
