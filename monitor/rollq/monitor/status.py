"""Where a run stands: read from the buffer and the queue of tickets, shown as a table or as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson
from rq import Queue

from rollq.buffer.batch_sizes import groups_at
from rollq.buffer.replies import Counts, LiveModel
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.rollouts import Status
from rollq.buffer.tickets import tickets_queued

STATUS_VERSION = 1
"""Of the JSON that `as_json` makes; grows when a field changes its meaning or goes."""

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
"""What the table shows of a worker's report; JSON has all of it."""


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """One task. `ready`: completed groups fresh enough for `step`, which takes `batch_groups` of them."""

    task: str
    step: int  # to be trained next
    version: int  # live weights, -1 before the first trainer
    epoch: int
    control: str
    control_reason: str  # why it is so; empty while production runs
    batch_groups: int
    stale_threshold: int
    ready: int
    statuses: Mapping[str, int]
    progress: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as it is now. `tickets`: work orders that no worker has taken; `workers`: name -> its last report."""

    run: str
    model: LiveModel | None
    tickets: int
    tasks: tuple[TaskStatus, ...]
    workers: Mapping[str, Mapping[str, Any]]


def read_status(buffer: MonitorBuffer, queue: Queue) -> RunStatus:
    """Look at a run. Reads only. Raises `StoreLost` when the server does not hold it."""
    return RunStatus(
        run=buffer.run,
        model=buffer.live_model(),
        tickets=tickets_queued(queue),
        tasks=tuple(_task_status(buffer.counts(task)) for task in sorted(buffer.tasks())),
        workers=buffer.workers(),
    )


def as_json(status: RunStatus) -> str:
    """One JSON object with the fields of `RunStatus`."""
    return orjson.dumps({"schema": STATUS_VERSION, **asdict(status)}, option=orjson.OPT_INDENT_2).decode()


def as_table(status: RunStatus) -> str:
    """The same for people, at most 100 columns wide as long as names are short."""
    lines = [f"run {status.run}: {_model_line(status.model)}; {status.tickets} tickets queued", ""]
    header = ["task", "step", "ready", *(status_.value for status_ in Status)]
    rows = [
        [task.task, str(task.step), f"{task.ready}/{task.batch_groups}", *(str(n) for n in task.statuses.values())]
        for task in status.tasks
    ]
    lines += _aligned([header, *rows])
    lines += [_control_line(task) for task in status.tasks if task.control != "run"]
    lines += ["", *(_worker_lines(status.workers) or ["no worker has reported lately"])]
    return "\n".join(lines)


def _task_status(counts: Counts) -> TaskStatus:
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
        progress=dict(sorted(counts.progress.items())),
    )


def _control_line(task: TaskStatus) -> str:
    return f"task {task.task} is set to {task.control!r}" + (f": {task.control_reason}" if task.control_reason else "")


def _model_line(model: LiveModel | None) -> str:
    if model is None:
        return "no weights published yet"
    return f"weights version {model.version} (epoch {model.epoch}, {model.digest[:12]})"


def _worker_lines(workers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    columns = [column for column in WORKER_COLUMNS if any(column in report for report in workers.values())]
    rows = [[name, *(_cell(report.get(column)) for column in columns)] for name, report in sorted(workers.items())]
    return _aligned([["worker", *columns], *rows]) if rows else []


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:,.1f}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:21]}..."


def _aligned(rows: list[list[str]]) -> list[str]:
    """Rows as lines: first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
