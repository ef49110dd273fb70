"""A run's curves as a table for a terminal, with a row for each range of steps. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollq.buffer.values.step_rows import StepRow, names_in
from rollq.monitor.report.curves import RunCurves
from rollq.monitor.text.tables import aligned
from rollq.monitor.text.units import count

MOST_ROWS = 20
MOST_CHANGES = 20
MOST_EVALUATIONS = 2
NAME_WIDTH = 12
"""The most characters of an evaluation's name."""


@dataclass(frozen=True, slots=True)
class _Column:
    """One column: its numbers' name, its title, and how to combine several steps into a row."""

    name: str
    title: str
    show: Callable[[float], str]
    of_range: Callable[[Sequence[float]], float]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _share(value: float) -> str:
    return f"{value:.0%}"


def _short(value: float) -> str:
    """A number in about five characters."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.0f}"


COLUMNS = (
    _Column("reward", "reward", _short, _mean),
    _Column("response_length/mean", "length", _short, _mean),
    _Column("response_length/max", "longest", _short, max),
    _Column("response_length/clip_ratio", "cut", _share, _mean),
    _Column("frac_reward_zero_std", "equal", _share, _mean),
    _Column("entropy", "entropy", _short, _mean),
    _Column("kl", "KL", _short, _mean),
    _Column("clip_fraction", "clip", _share, _mean),
    _Column("gradient_norm", "grad", _short, _mean),
    _Column("learning_rate", "lr", _short, _mean),
    _Column("tokens_per_s", "tok/s", _short, _mean),
)
SPARE = ("longest", "tok/s", "lr", "clip", "KL", "grad", "entropy", "cut", "length", "equal")
"""Titles of columns that a narrow terminal omits first."""


def as_step_table(curves: RunCurves, width: int) -> str:
    """The steps, each row with the mean over a range of them (for `longest`, the largest), then the changes; at most
    `width` characters wide if names are short."""
    steps = curves.rows.steps
    if not steps and not curves.rows.evaluations:
        return f"run {curves.run}: no train step yet"
    source = f"; {curves.note}" if curves.note else ""
    lines = [f"run {curves.run}: {count(len(steps), 'train step')}{source}", ""]
    lines += [line[:width] for line in _table(curves, width)]
    if curves.changes:
        lines += ["", "changes by step", *_changes(curves)]
    return "\n".join(lines)


def _changes(curves: RunCurves) -> list[str]:
    rows = [(f"{change.step:,}", change.task or "-", change.text) for change in curves.changes[-MOST_CHANGES:]]
    return [f"  {line}" for line in aligned(rows, left=(1, 2))]


def _table(curves: RunCurves, width: int) -> list[str]:
    present = names_in(curves.rows.steps)
    columns = {column.title: _cells(column, curves) for column in COLUMNS if column.name in present}
    columns |= _evaluations(curves)
    first = ["step", *(_range(rows) for rows in _ranges(curves))]
    for title in (*SPARE, ""):
        lines = aligned(list(zip(first, *([name, *cells] for name, cells in columns.items()), strict=True)))
        if max(map(len, lines)) <= width:
            break
        columns.pop(title, None)
    return lines


def _ranges(curves: RunCurves) -> list[Sequence[StepRow]]:
    """The steps in ranges; for a run that has not trained yet, the evaluations."""
    rows = curves.rows.steps or curves.rows.evaluations
    parts = min(MOST_ROWS, len(rows))
    ends = [len(rows) * (at + 1) // parts for at in range(parts)]
    return [rows[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _range(rows: Sequence[StepRow]) -> str:
    first, last = rows[0].step, rows[-1].step
    return f"{first}" if first == last else f"{first}-{last}"


def _cells(column: _Column, curves: RunCurves) -> list[str]:
    return [_cell([row.numbers for row in rows], column) for rows in _ranges(curves)]


def _cell(numbers: Sequence[Mapping[str, float]], column: _Column) -> str:
    values = [of_step[column.name] for of_step in numbers if column.name in of_step]
    return column.show(column.of_range(values)) if values else "-"


def _evaluations(curves: RunCurves) -> dict[str, list[str]]:
    """Columns with evaluations' rewards: the mean since the previous row."""
    rows = curves.rows.evaluations
    lasts = [of_range[-1].step for of_range in _ranges(curves)]
    latest = max(lasts[-1], rows[-1].step) if rows else lasts[-1]
    spans = list(zip([-1, *lasts[:-1]], [*lasts[:-1], latest], strict=True))
    return {
        name[:NAME_WIDTH]: [
            _cell([row.numbers for row in rows if after < row.step <= last], _Column(name, name, _short, _mean))
            for after, last in spans
        ]
        for name in names_in(rows)[:MOST_EVALUATIONS]
    }
