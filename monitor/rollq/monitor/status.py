"""The status of a run, read from the buffer and the queue of tickets, as a table or as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson
from rq import Queue

from rollq.buffer.batch_sizes import groups_at
from rollq.buffer.replies import Counts, LastError, LiveModel
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.rollouts import Status
from rollq.buffer.tickets import tickets_queued
from rollq.monitor.tables import aligned
from rollq.monitor.units import in_words

STATUS_VERSION = 1
"""Version of the JSON that `as_json` returns; it grows when a field is removed or changes its meaning."""

WORKER_COLUMNS = (
    "engine",
    "epoch",
    "version",
    "state",
    "in_flight",
    "tokens_per_s",
    "groups",
    "failed_samples",
    "refused",
    "age_s",
)
"""The fields of a worker's report that the table shows; JSON has all fields."""
MOST_ERROR_CHARS = 300
"""Characters of a last error that the table shows; JSON has all that is kept."""
MISMATCH_FIELDS = ("mean", "p99", "max", "kl", "effective_sample_size")
"""The fields of the trainer's mismatch that are shown; JSON also has them by task, worker and version."""


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """The status of one task.

    `ready` counts completed groups that are fresh enough for `step`, whose batch takes `batch_groups`. `statuses`
    counts groups by status, `bytes` says what their frames take, and `progress` has the task's cumulative counters.
    `last_error`: None before the first one.
    """

    task: str
    step: int  # trained next
    version: int  # of the live weights, -1 before the first trainer
    epoch: int
    control: str
    control_reason: str  # empty while production runs
    batch_groups: int
    stale_threshold: int
    ready: int
    statuses: Mapping[str, int]
    bytes: Mapping[str, int]
    progress: Mapping[str, float]
    last_error: LastError | None = None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run. `tickets` counts tickets in the queue; `workers` maps a worker to its last report.

    `trainer` is the trainer's last report: the metrics of its last step.
    """

    run: str
    model: LiveModel | None
    tickets: int
    tasks: tuple[TaskStatus, ...]
    workers: Mapping[str, Mapping[str, Any]]
    trainer: Mapping[str, Any] | None = None


def read_status(buffer: MonitorBuffer, queue: Queue) -> RunStatus:
    """Read the status of a run, without changing anything. Raises `StoreLost` if the server does not have the run."""
    return RunStatus(
        run=buffer.run,
        model=buffer.live_model(),
        tickets=tickets_queued(queue),
        tasks=tuple(_task_status(buffer, buffer.counts(task)) for task in sorted(buffer.tasks())),
        workers=buffer.workers(),
        trainer=buffer.trainer(),
    )


def as_json(status: RunStatus) -> str:
    """Return one JSON object with the fields of `RunStatus` and the version of its format as `schema`."""
    return orjson.dumps({"schema": STATUS_VERSION, **asdict(status)}, option=orjson.OPT_INDENT_2).decode()


def as_table(run: RunStatus) -> str:
    """Return tables of tasks and workers; at most 100 characters wide if names are short."""
    lines = [f"run {run.run}: {_model_line(run.model)}; {run.tickets} tickets queued", ""]
    header = ["task", "step", "ready", *(status.value for status in Status)]
    rows = [
        [task.task, str(task.step), f"{task.ready}/{task.batch_groups}", *(str(n) for n in task.statuses.values())]
        for task in run.tasks
    ]
    lines += aligned([header, *rows])
    lines += [f"task {task.task}: {_memory_line(task)}" for task in run.tasks if task.bytes]
    lines += [_control_line(task) for task in run.tasks if task.control != "run"]
    lines += [_error_line(task.task, task.last_error) for task in run.tasks if task.last_error]
    lines += ["", _trainer_line(run.trainer)] if run.trainer else []
    lines += ["", *(_worker_lines(run.workers) or ["no worker has reported lately"])]
    lines += [f"{name}: {why}" for name, report in run.workers.items() if (why := report.get("refused_weights"))]
    return "\n".join(lines)


def _task_status(buffer: MonitorBuffer, counts: Counts) -> TaskStatus:
    clock = counts.clock
    return TaskStatus(
        task=counts.task,
        step=clock.step,
        version=clock.version,
        epoch=clock.epoch,
        control=clock.control.value,
        control_reason=clock.control_reason,
        batch_groups=groups_at(clock.rules.batch_groups, clock.rules.schedule, clock.step),
        stale_threshold=clock.rules.stale_threshold,
        ready=counts.ready,
        statuses={status.value: counts.statuses.get(status, 0) for status in Status},
        bytes={status.value: taken for status, taken in buffer.bytes_by_status(counts).items()},
        progress=dict(sorted(counts.progress.items())),
        last_error=counts.last_error,
    )


def _memory_line(task: TaskStatus) -> str:
    parts = ", ".join(f"{status} {in_words(taken)}" for status, taken in task.bytes.items())
    return f"samples take {in_words(sum(task.bytes.values()))} ({parts})"


def _control_line(task: TaskStatus) -> str:
    return f"task {task.task} is set to {task.control!r}" + (f": {task.control_reason}" if task.control_reason else "")


def _error_line(task: str, error: LastError) -> str:
    text = " ".join(error.text.split())
    shown = text if len(text) <= MOST_ERROR_CHARS else text[: MOST_ERROR_CHARS - 3] + "..."
    return f"task {task}: last error ({error.age_s:,.0f} s ago): {shown}"


def _model_line(model: LiveModel | None) -> str:
    if model is None:
        return "no weights published yet"
    return f"weights version {model.version} (epoch {model.epoch}, {model.digest[:12]})"


def _trainer_line(report: Mapping[str, Any]) -> str:
    """The trainer's last step, and its mismatch with the engines. A custom trainer may report other facts."""
    what = f"trained step {report['step']}" if "step" in report else "reported"
    facts = [f"{what} {report['age_s']:,.0f} s ago"]
    if isinstance(reward := report.get("reward"), float):
        facts.append(f"reward {reward:.3f}")
    mismatch = report.get("mismatch")
    if isinstance(mismatch, Mapping):
        shown = [f"{name} {_short(mismatch[name])}" for name in MISMATCH_FIELDS if name in mismatch]
        facts += [f"mismatch with the engines: {', '.join(shown)}"] if shown else []
    return "trainer: " + "; ".join(facts)


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, int | float) else "-"


def _worker_lines(workers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    columns = [column for column in WORKER_COLUMNS if any(column in report for report in workers.values())]
    rows = [[name, *(_cell(report.get(column)) for column in columns)] for name, report in sorted(workers.items())]
    return aligned([["worker", *columns], *rows]) if rows else []


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:,.1f}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
