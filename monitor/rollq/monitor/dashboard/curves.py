"""The curves of a run as columns for charts. Pure."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rollq.buffer.values.curves import CHARTS, lines_of
from rollq.buffer.values.step_rows import StepRow, thinned
from rollq.monitor.report.curves import RunCurves

MOST_POINTS = 1000


def columns(curves: RunCurves) -> dict[str, Any]:
    """Columns of equal length, at most `MOST_POINTS` long: `steps`, `time_s`, and the `series` by name, None where a
    step has no such number. `evaluations` are points on the same axis, and `curves` are the charts that have lines.
    """
    rows = thinned(curves.rows.steps, MOST_POINTS)
    names = sorted({name for row in rows for name in row.numbers})
    evaluations = sorted({name for row in curves.rows.evaluations for name in row.numbers})
    return {
        "run": curves.run,
        "source": curves.source,
        "steps": [row.step for row in rows],
        "time_s": [row.time_s for row in rows],
        "series": {name: [row.numbers.get(name) for row in rows] for name in names},
        "evaluations": {name: _points(curves.rows.evaluations, name) for name in evaluations},
        "changes": [asdict(change) for change in curves.changes],
        "curves": [
            {"name": chart.name, "title": chart.title, "unit": chart.unit, "group": chart.group, "lines": lines}
            for chart in CHARTS
            if (lines := lines_of(chart, names))
        ],
    }


def _points(rows: Sequence[StepRow], name: str) -> dict[str, list[Any]]:
    found = thinned([row for row in rows if name in row.numbers], MOST_POINTS)
    return {
        "steps": [row.step for row in found],
        "time_s": [row.time_s for row in found],
        "reward": [row.numbers[name] for row in found],
    }
