"""The table of `rollq status --steps`."""

import pytest

from rollq.buffer.values.step_rows import StepRow, StepRows
from rollq.monitor.report.curves import Change, RunCurves
from rollq.monitor.report.step_table import COLUMNS, MOST_ROWS, as_step_table

NUMBERS = {column.name: 0.125 for column in COLUMNS} | {"response_length/mean": 212.5, "learning_rate": 1e-6}


def curves(steps: int, *, every: int = 100) -> RunCurves:
    rows = tuple(StepRow(step, 0.0, {**NUMBERS, "reward": step / 1000}) for step in range(1, steps + 1))
    evaluations = tuple(StepRow(step, 0.0, {"held_out": step / 1000}) for step in range(0, steps + 1, every))
    return RunCurves("sums", "server", StepRows(rows, evaluations), (Change(40, 0.0, "math", "max_tries 3 -> 4"),))


def test_long_runs_have_a_row_for_each_range_of_steps() -> None:
    lines = as_step_table(curves(400), 200).splitlines()
    assert lines[0] == "run sums: 400 train steps"
    header, *rows = (line.split() for line in lines[2:-3])
    assert header == ["step", *(column.title for column in COLUMNS), "held_out"]
    assert len(rows) == MOST_ROWS
    first, second, last = (dict(zip(header, rows[at], strict=True)) for at in (0, 1, -1))
    assert (first["step"], first["reward"], first["held_out"]) == ("1-20", "0.010", "0.000")
    assert (second["step"], second["held_out"]) == ("21-40", "-")
    assert (last["step"], last["reward"], last["held_out"]) == ("381-400", "0.391", "0.400")
    assert (last["length"], last["cut"], last["lr"]) == ("212", "12%", "1e-06")
    assert lines[-2:] == ["changes by step", "  40  math  max_tries 3 -> 4"]


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_columns_are_left_out_where_the_terminal_is_narrow(width: int) -> None:
    lines = as_step_table(curves(30_000), width).splitlines()
    assert max(map(len, lines)) <= width
    assert {"step", "reward", "held_out"} <= set(lines[2].split())


def test_most_columns_fit_into_80_characters() -> None:
    titles = as_step_table(curves(400), 80).splitlines()[2].split()
    assert {"length", "cut", "equal", "entropy", "grad"} <= set(titles)


def test_numbers_that_a_run_does_not_report_have_no_column() -> None:
    rows = (StepRow(1, 0.0, {"reward": 0.5}), StepRow(2, 0.0, {"loss": 0.5}))
    lines = as_step_table(RunCurves("sums", "files", StepRows(rows), note="from files"), 80).splitlines()
    assert lines == ["run sums: 2 train steps; from files", "", "step  reward", "1      0.500", "2          -"]


def test_a_run_that_was_only_evaluated_has_a_row_for_it() -> None:
    rows = StepRows((), (StepRow(0, 0.0, {"held_out": 0.25}),))
    assert as_step_table(RunCurves("sums", "server", rows), 80).splitlines()[-1] == "0        0.250"


def test_a_run_without_a_step_says_so() -> None:
    assert as_step_table(RunCurves("sums", "server", StepRows()), 80) == "run sums: no train step yet"
