"""A run's curves by train step, read from the server or, if the run is gone there, from the trainer's files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from rollq.buffer.calls.evaluations import rewards_of
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.curves import as_number, numbers_of, step_of
from rollq.buffer.values.step_rows import StepRow, StepRows
from rollq.monitor.report.records import METRICS_FILE, read_lines

EVALUATIONS_FILE = "evaluations.jsonl"
RATE = "learning_rate"


@dataclass(frozen=True, slots=True)
class Change:
    """A change to a task's rules, or to the learning rate, which has no task. `step` is the first train step that was
    or can be claimed after the change."""

    step: int
    time_s: float
    task: str
    text: str


@dataclass(frozen=True, slots=True)
class RunCurves:
    """The numbers of a run by train step. `changes` are in step order; files have no rule changes. `note`, for the
    page, says why the numbers are from files."""

    run: str
    source: Literal["server", "files"]
    rows: StepRows
    changes: tuple[Change, ...] = ()
    note: str = ""


def read_curves(buffer: MonitorBuffer) -> RunCurves:
    """The curves on the server. Raises `StoreLost` without the run."""
    found = {
        (revision.step, task_of(task), revision.what): Change(
            revision.step, revision.time_s, task_of(task), revision.what
        )
        for task in buffer.tasks()
        for revision in buffer.rule_revisions(task)
        if revision.what
    }
    rows = buffer.curves()
    changes = sorted([*found.values(), *rate_changes(rows.steps)], key=lambda change: (change.step, change.time_s))
    return RunCurves(buffer.run, "server", rows, tuple(changes))


def rate_changes(rows: Sequence[StepRow]) -> Iterator[Change]:
    """The changes of a learning rate that was constant for the two steps before. A schedule that changes the rate at
    each step gives at most one change, at its start."""
    rates = [(row, row.numbers[RATE]) for row in rows if RATE in row.numbers]
    for ((_, former), (_, before)), (row, after) in zip(pairwise(rates), rates[2:], strict=False):
        if former == before != after:
            yield Change(row.step, row.time_s, "", f"{RATE} {before:g} -> {after:g}")


def curves_in(folder: Path, run: str, why: str = "") -> RunCurves:
    """The curves in the output folder of a run's trainer; empty for a folder without curves. `why` says why the server
    has no curves."""
    steps = {row.step: row for row in _rows(folder / METRICS_FILE, numbers_of)}
    evaluations = {row.step: row for row in _rows(folder / EVALUATIONS_FILE, rewards_of)}
    rows = StepRows(*(tuple(found[step] for step in sorted(found)) for found in (steps, evaluations)))
    note = f"from the files in {folder}, since {why}" if why else f"from the files in {folder}"
    return RunCurves(run, "files", rows, tuple(rate_changes(rows.steps)), note)


def _rows(path: Path, numbers: Callable[[Mapping[str, Any]], Mapping[str, float]]) -> Iterator[StepRow]:
    for line in read_lines(path):
        if (step := step_of(line)) is not None:
            yield StepRow(step, as_number(line.get("time_s")) or 0.0, numbers(line))
