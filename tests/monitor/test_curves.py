"""Curves as monitors read them: from the server, from files, and as the columns of charts."""

import json
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.values.curves import CHARTS
from rollq.buffer.values.step_rows import StepRow, StepRows
from rollq.monitor.dashboard.curves import MOST_POINTS, columns
from rollq.monitor.report.curves import RunCurves, curves_in, rate_changes, read_curves
from support.buffer_run import World


def test_the_server_has_numbers_evaluations_and_changes_of_rules(buffer: Buffer) -> None:
    world = World(buffer).start(math={"max_staleness": 2}, code={})
    buffer.report_trainer(world.held, {"step": 1, "reward": 0.5, "rewards": {"math": 0.5}, "loss": 1.0})
    buffer.report_trainer(world.held, {"step": 2, "reward": 0.75, "rewards": {"math": 0.75}})
    buffer.report_evaluations(world.held, 0, {"held_out": 0.25})
    buffer.change_rules("math", {"max_staleness": 4, "max_tries": 7})
    buffer.change_rules("code", {"batch_groups": 3})
    found = columns(read_curves(buffer))
    assert (found["run"], found["source"], found["steps"]) == (buffer.run, "server", [1, 2])
    assert found["series"] == {"reward": [0.5, 0.75], "rewards/math": [0.5, 0.75], "loss": [1.0, None]}
    held_out = found["evaluations"]["held_out"]
    assert (held_out["steps"], held_out["reward"], len(held_out["time_s"])) == ([0], [0.25], 1)
    changes = {change["task"]: change for change in found["changes"]}
    assert changes["math"]["text"] == "max_tries 3 -> 7, max_staleness 2 -> 4"
    assert changes["code"]["text"].startswith("batch_groups 2 -> 3 from step ")
    assert changes["math"]["step"] == 1
    assert {chart["name"]: chart["lines"] for chart in found["curves"]} == {
        "reward": ["reward", "rewards/math"],
        "loss": ["loss"],
    }


def test_files_have_the_same_numbers(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "time_s": 10.0, "reward": 0.1, "rewards": {"math": 0.1}},
        {"step": 2, "time_s": 11.0, "reward": 0.2, "workers": {"gpu0": 4}},
        {"step": 2, "time_s": 12.0, "reward": 0.25},
    ]
    evaluations = [{"step": 0, "version": 0, "time_s": 9.0, "eval/held_out/reward": 0.5, "eval/held_out/count": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "re')
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    found = columns(curves_in(tmp_path, "sums"))
    assert (found["source"], found["steps"], found["time_s"]) == ("files", [1, 2], [10.0, 12.0])
    assert found["series"] == {"reward": [0.1, 0.25], "rewards/math": [0.1, None]}
    assert found["evaluations"] == {"held_out": {"steps": [0], "time_s": [9.0], "reward": [0.5]}}
    assert found["changes"] == []


def test_a_folder_without_files_has_no_curves(tmp_path: Path) -> None:
    assert curves_in(tmp_path, "sums").rows == StepRows()


def test_long_runs_are_thinned_for_charts() -> None:
    rows = tuple(StepRow(step, step / 10, {"reward": step / 10**4}) for step in range(1, 5001))
    found = columns(RunCurves("sums", "server", StepRows(rows, rows)))
    assert len(found["steps"]) == len(found["series"]["reward"]) == MOST_POINTS
    assert (found["steps"][0], found["steps"][-1]) == (1, 5000)
    assert len(found["evaluations"]["reward"]["steps"]) == MOST_POINTS


def test_every_line_of_the_table_has_one_name() -> None:
    names = [line.name for chart in CHARTS for line in chart.lines]
    assert len(set(names)) == len(names)
    assert len({chart.name for chart in CHARTS}) == len(CHARTS)


@pytest.mark.parametrize(
    ("rates", "changes"),
    [
        ([0.001, 0.001, 0.001, 0.0003, 0.0003], [(4, "learning_rate 0.001 -> 0.0003")]),
        (
            [0.001, 0.001, 0.0005, 0.0005, 0.00025],
            [(3, "learning_rate 0.001 -> 0.0005"), (5, "learning_rate 0.0005 -> 0.00025")],
        ),
        ([0.001, 0.001, 0.0009, 0.0008, 0.0007], [(3, "learning_rate 0.001 -> 0.0009")]),
        ([0.001, None, 0.001, None, 0.01], [(5, "learning_rate 0.001 -> 0.01")]),
        ([0.001, 0.002, 0.003, 0.003, 0.003], []),
        ([0.001], []),
    ],
)
def test_a_learning_rate_that_was_constant_has_changes(
    rates: list[float | None], changes: list[tuple[int, str]]
) -> None:
    numbers = [{"learning_rate": rate} if rate is not None else {"loss": 1.0} for rate in rates]
    rows = [StepRow(step, step / 10, of_step) for step, of_step in enumerate(numbers, 1)]
    assert [(change.step, change.text) for change in rate_changes(rows)] == changes
    assert all((change.task, change.time_s) == ("", change.step / 10) for change in rate_changes(rows))
