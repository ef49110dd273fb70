"""The curves of a run as columns for charts. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rollq.buffer.values.curves import CHARTS, lines_of
from rollq.buffer.values.step_rows import StepRow, names_in, thinned
from rollq.monitor.report.curves import RunCurves

MOST_POINTS = 1000


def columns(curves: RunCurves) -> dict[str, Any]:
    """Columns of equal length, at most `MOST_POINTS` long: `steps`, `time_s`, and the `series` by name, None where a
    step has no such number. `evaluations` holds points on the same axis, and `curves` the charts with lines.
    """
    rows = thinned(curves.rows.steps, MOST_POINTS)
    names = names_in(rows)
    return {
        "run": curves.run,
        "source": curves.source,
        "steps": [row.step for row in rows],
        "time_s": [row.time_s for row in rows],
        "series": {name: [row.numbers.get(name) for row in rows] for name in names},
        "evaluations": {name: _points(curves.rows.evaluations, name) for name in names_in(curves.rows.evaluations)},
        "changes": list(map(asdict, curves.changes)),
        "curves": list(_charts(names)),
    }


def _charts(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for chart in CHARTS:
        if lines := lines_of(chart, names):
            yield {"name": chart.name, "title": chart.title, "unit": chart.unit, "group": chart.group, "lines": lines}


def _points(rows: Sequence[StepRow], name: str) -> dict[str, list[Any]]:
    found = thinned([row for row in rows if name in row.numbers], MOST_POINTS)
    return {
        "steps": [row.step for row in found],
        "time_s": [row.time_s for row in found],
        "reward": [row.numbers[name] for row in found],
    }
