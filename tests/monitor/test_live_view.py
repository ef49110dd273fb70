from collections.abc import Sequence
from io import StringIO

import pytest
from rich.console import Console

from rollq.monitor.report.live_view import (
    LiveView,
    mean_reward,
    plain_line,
    remaining_s,
    render,
    sparkline,
    staleness_shares,
    tokens_per_s,
)
from rollq.monitor.report.records import BufferReading, StepRecord

TASKS = ("sums", "sorting")


def steps(count: int, tasks: Sequence[str] = TASKS) -> list[StepRecord]:
    return [
        StepRecord(
            step=n,
            time_s=1000 + n / 2,
            reward=n / count,
            rewards=dict.fromkeys(tasks, n / count),
            tokens=300,
            staleness_tokens={0: 100, 1: 200},
            wait_s=0.25,
            train_s=0.125,
        )
        for n in range(1, count + 1)
    ]


def reading(tasks: Sequence[str] = TASKS, workers: int = 2) -> BufferReading:
    return BufferReading(
        time_s=1050,
        depths={task: {"pending": 3, "running": 12_345, "archived": 1_234_567} for task in tasks},
        workers={f"worker-{n}": {"version": 98 + n, "in_flight": 32, "groups": 1500} for n in range(workers)},
        version=99,
    )


def lines(view: LiveView) -> list[str]:
    console = Console(file=StringIO(), width=80, height=24, color_system=None)
    console.print(render(view))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("tasks", [TASKS, [f"a-long-name-{n}" for n in range(2)], [f"task-{n}" for n in range(9)]])
def test_a_busy_run_fits_a_terminal_of_80_by_24(tasks: Sequence[str]) -> None:
    view = LiveView(
        title="rollq demo " + "x" * 20,
        total_steps=1000,
        elapsed_s=3000,
        steps=steps(900, tasks=tasks),
        reading=reading(tasks, workers=9),
        notes=[f"note {n} " + "long " * 40 for n in range(9)],
    )
    shown = lines(view)
    assert len(shown) <= 24
    assert max(len(line) for line in shown) <= 80
    assert any("note 8" in line for line in shown)


def test_the_view_shows_step_reward_staleness_depths_and_versions() -> None:
    shown = "\n".join(lines(LiveView("rollq demo", 100, 60.0, steps=steps(50), reading=reading())))
    for part in ("step 50/100", "v99", "1:00 elapsed", "0:25 left", "0: 33%  1: 67%", "600 tokens/s", "12,345", "v98"):
        assert part in shown, part
    assert "waits 250 ms, trains 125 ms a step" in shown


def test_a_worker_that_has_not_reported_for_a_while_is_shown_as_silent() -> None:
    reports = {"a": {"version": 3, "in_flight": 17, "age_s": 0.4}, "b": {"version": 3, "in_flight": 19, "age_s": 9.0}}
    shown = "\n".join(lines(LiveView("rollq demo", 100, 60.0, reading=BufferReading(1.0, workers=reports))))
    assert "17" in shown
    assert "19" not in shown
    assert "silent" in shown


def test_a_run_that_has_not_started_can_be_shown() -> None:
    view = LiveView("rollq demo", 100, 0.0)
    assert any("step 0/100" in line for line in lines(view))
    assert "waiting for the first batch" in plain_line(view)


def test_the_plain_line_says_the_same_in_one_line() -> None:
    line = plain_line(LiveView("rollq demo", 100, 60.0, steps=steps(50), reading=reading()))
    assert "\n" not in line
    for part in ("1:00 step 50/100", "reward 0.810", "s0 33% s1 67%", "600 tokens/s", "pending 6", "worker-1@v99"):
        assert part in line, part


def test_a_sparkline_averages_what_does_not_fit_and_spans_its_own_range() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([0.5, 0.5], 10) == "▁▁"
    assert sparkline([0.0, 1.0], 10) == "▁█"
    assert sparkline([0.0, 0.0, 1.0, 1.0], 2) == "▁█"
    assert len(sparkline([n / 7 for n in range(1001)], 46)) <= 46


def test_rates_and_shares_are_weighted_by_tokens_and_need_a_pace() -> None:
    run = steps(5)
    assert tokens_per_s(run) == 4 * 300 / 2
    assert tokens_per_s(run[:1]) == 0.0
    assert staleness_shares([]) == {}
    assert staleness_shares(run) == {0: 100 / 300, 1: 200 / 300}
    assert mean_reward(run, "no such task") == 0.0
    assert remaining_s(LiveView("r", 100, 1.0, steps=run[:1])) is None
    assert remaining_s(LiveView("r", 15, 1.0, steps=run)) == 5.0
