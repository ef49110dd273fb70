"""The curves of a run by train step: read from the server, or from the files of its trainer where that is gone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollq.buffer.calls.evaluations import rewards_of
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.curves import as_number, numbers_of, step_of
from rollq.buffer.values.step_rows import StepRow, StepRows
from rollq.monitor.report.records import METRICS_FILE, read_lines

EVALUATIONS_FILE = "evaluations.jsonl"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a task's rules. `step`: the first train step that was claimed, or can be, after it."""

    step: int
    time_s: float
    task: str
    text: str


@dataclass(frozen=True, slots=True)
class RunCurves:
    """The numbers of a run by train step. `changes` are in the order of their steps; files have none. `note`: why they
    are from files, for people."""

    run: str
    source: Literal["server", "files"]
    rows: StepRows
    changes: tuple[Change, ...] = ()
    note: str = ""


def read_curves(buffer: MonitorBuffer) -> RunCurves:
    """The curves that the server has. Raises `StoreLost` without the run."""
    found = {
        (revision.step, task_of(task), revision.what): Change(
            revision.step, revision.time_s, task_of(task), revision.what
        )
        for task in buffer.tasks()
        for revision in buffer.rule_revisions(task)
        if revision.what
    }
    changes = sorted(found.values(), key=lambda change: (change.step, change.time_s))
    return RunCurves(buffer.run, "server", buffer.curves(), tuple(changes))


def curves_in(folder: Path, run: str, why: str = "") -> RunCurves:
    """The curves in the output folder of the trainer of a run; empty for a folder without any. `why`: the server has
    none."""
    steps = {row.step: row for row in _rows(folder / METRICS_FILE, numbers_of)}
    evaluations = {row.step: row for row in _rows(folder / EVALUATIONS_FILE, rewards_of)}
    by_step = (tuple(rows[step] for step in sorted(rows)) for rows in (steps, evaluations))
    note = f"from the files in {folder}, since {why}" if why else f"from the files in {folder}"
    return RunCurves(run, "files", StepRows(*by_step), note=note)


def _rows(path: Path, numbers: Callable[[Mapping[str, Any]], Mapping[str, float]]) -> Iterator[StepRow]:
    for line in read_lines(path):
        if (step := step_of(line)) is not None:
            yield StepRow(step, as_number(line.get("time_s")) or 0.0, numbers(line))
