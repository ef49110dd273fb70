"""The tables and charts of `rollq top` as text. Pure."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rollq.buffer.values.history import HistoryRow
from rollq.buffer.values.rollouts import Status
from rollq.monitor.status.read import RunStatus, TaskStatus
from rollq.monitor.status.text import WORKER_COLUMNS, length_cell, reward_cell, worker_cell, worker_columns
from rollq.monitor.text.tables import fitting

BARS = " ▁▂▃▄▅▆▇█"
TASK_COLUMNS: dict[str, Callable[[TaskStatus, Sequence[TaskStatus]], str]] = {
    "task": lambda task, _: task.task,
    "step": lambda task, _: str(task.step),
    "reward": reward_cell,
    "length": lambda task, _: length_cell(task),
    "ready": lambda task, _: f"{task.ready}/{task.batch_groups}",
    "bound": lambda task, _: task.bound,
    "pending": lambda task, _: str(task.groups(Status.PENDING)),
    "running": lambda task, _: str(task.groups(Status.RUNNING)),
    "groups/s": lambda task, _: f"{task.rates.groups:.2f}" if task.rates else "-",
    "tokens/s": lambda task, _: f"{task.rates.tokens:,.0f}" if task.rates else "-",
    "kept": lambda task, _: f"{task.kept / task.outcomes:.0%}" if task.outcomes else "-",
    "state": lambda task, _: task.state,
}
"""The columns of the tasks' table, each with a function that makes a cell from a task and all tasks."""
SPARE_TASK_COLUMNS = ("bound", "groups/s", "kept", "running", "pending")
"""The columns to leave out first on a narrow terminal."""
CELL_PADDING = 2

Rows = dict[str, list[str]]
"""Each row's cells, by the row's key."""


def task_rows(run: RunStatus, width: int) -> tuple[list[str], Rows]:
    """The titles of the columns that fit into a width, and a row for each task, without evaluations."""
    tasks = run.task_list
    cells = {title: [cell(task, tasks) for task in tasks] for title, cell in TASK_COLUMNS.items()}
    widths = {title: max(map(len, [title, *column])) + CELL_PADDING for title, column in cells.items()}
    titles = fitting(widths, SPARE_TASK_COLUMNS, width)
    return titles, {task.task: [cells[title][at] for title in titles] for at, task in enumerate(tasks)}


def worker_rows(run: RunStatus, width: int, by: str, *, falling: bool) -> tuple[list[str], Rows]:
    """The titles of the columns that fit into a width, and a row for each worker.

    Rows are sorted by the report's column `by`, or by name for `worker`; workers without a value come last. An empty
    `by` puts workers in trouble first.
    """
    columns = worker_columns(run.workers, width)
    arrow = "▼" if falling else "▲"
    titles = [
        title + (arrow if column == by else "")
        for column, title in {"worker": "worker", **{name: WORKER_COLUMNS[name] for name in columns}}.items()
    ]
    return titles, {
        name: [name, *(worker_cell(column, run.workers[name]) for column in columns)]
        for name in _sorted(run.workers, by, falling)
    }


def _sorted(workers: Mapping[str, Mapping[str, Any]], by: str, falling: bool) -> list[str]:
    names = sorted(workers)
    if not by:
        return sorted(names, key=lambda name: workers[name]["condition"] == "alive")
    if by == "worker":
        return sorted(names, reverse=falling)
    with_value = [name for name in names if workers[name].get(by) is not None]
    with_value.sort(key=lambda name: str(workers[name][by]) if by in ("host", "engine", "state") else workers[name][by])
    return (with_value[::-1] if falling else with_value) + [name for name in names if workers[name].get(by) is None]


def charts(history: Sequence[HistoryRow], width: int) -> list[str]:
    """A line each for ready groups, groups per second and tokens per second, newest on the right."""
    if len(history) < 2:
        return ["no history yet: a running producer adds a row every 10 s"]
    ready = [float(row.ready) for row in history]
    return [
        chart("ready groups", ready, width),
        chart("groups/s", per_second(history, "produced"), width),
        chart("tokens/s", per_second(history, "tokens"), width),
    ]


def per_second(history: Sequence[HistoryRow], counter: str) -> list[float]:
    """The rate at which a counter grew between consecutive rows."""
    return [
        max(0.0, after.counters.get(counter, 0) - before.counters.get(counter, 0))
        / max(0.001, (after.at_ms - before.at_ms) / 1000)
        for before, after in pairwise(history)
    ]


def chart(title: str, values: Sequence[float], width: int) -> str:
    """A line of bars from 0 to the largest value, between the title and the last value."""
    last = f"{values[-1]:,.1f}" if values else "-"
    shown = values[-max(1, width - 14 - 12) :]
    top = max(shown, default=0.0)
    bars = "".join(BARS[round(value / top * (len(BARS) - 1))] if top else BARS[0] for value in shown)
    return f"{title:<13} {bars} {last}"
