"""The tables, charts and questions of `rollq top`."""

import pytest

from rollq.buffer.calls.orders import Order
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.values.history import HistoryRow
from rollq.buffer.values.rollouts import Status
from rollq.cli.changes import change_of
from rollq.cli.steering import CONTROLS, why_not
from rollq.cli.top.tables import BARS, TASK_COLUMNS, chart, charts, per_second, task_rows, worker_rows
from support.run_statuses import RATES, run_status, task_status, worker

MATH = task_status(
    "math",
    {Status.PENDING: 4, Status.RUNNING: 13, Status.COMPLETED: 3},
    rates=RATES,
    reward=0.25,
    response_tokens=1234.0,
)
WORKERS = {
    "b": worker(3, tokens_per_s=10.0),
    "a": worker(5, tokens_per_s=30.0),
    "c": worker(1, condition="dead", tokens_per_s=None),
}
HELD_OUT = task_status("held_out", kind="eval")
RUN = run_status(MATH, task_status("code", control="done", reward=0.75), HELD_OUT, workers=WORKERS)


def row(at_s: int, ready: int, tokens: float) -> HistoryRow:
    return HistoryRow(at_s * 1000, 1, 0, ready, {}, {"tokens": tokens, "produced": tokens / 100})


def test_a_row_of_a_task_has_what_its_columns_say() -> None:
    titles, rows = task_rows(RUN, 120)
    assert titles == list(TASK_COLUMNS)
    assert dict(zip(titles, rows["math"], strict=True)) == {
        "task": "math", "step": "41", "reward": "lowest 0.250", "length": "1,234",
        "ready": "3/16", "bound": "20/32", "pending": "4", "running": "13",
        "groups/s": "4.00", "tokens/s": "2,000", "kept": "90%", "state": "run",
    }  # fmt: skip


def test_evaluations_are_no_tasks() -> None:
    assert list(task_rows(RUN, 120)[1]) == ["math", "code"]


def test_a_narrow_terminal_leaves_columns_of_tasks_out_and_keeps_the_reward() -> None:
    titles, rows = task_rows(RUN, 60)
    assert {"task", "reward", "length", "ready", "tokens/s", "state"} <= set(titles) < set(TASK_COLUMNS)
    assert all(len(row) == len(titles) for row in rows.values())


@pytest.mark.parametrize(
    ("by", "falling", "order"),
    [
        ("", False, ["c", "a", "b"]),
        ("worker", False, ["a", "b", "c"]),
        ("worker", True, ["c", "b", "a"]),
        ("tokens_per_s", False, ["b", "a", "c"]),
        ("tokens_per_s", True, ["a", "b", "c"]),
        ("in_flight", True, ["a", "b", "c"]),
    ],
)
def test_workers_are_sorted_and_those_without_a_value_come_last(by: str, falling: bool, order: list[str]) -> None:
    titles, rows = worker_rows(RUN, 120, by, falling=falling)
    assert list(rows) == order
    assert sum(title.endswith(("▲", "▼")) for title in titles) == bool(by)
    assert all(len(cells) == len(titles) for cells in rows.values())


def test_a_narrow_terminal_leaves_columns_out() -> None:
    assert len(worker_rows(RUN, 40, "", falling=False)[0]) < len(worker_rows(RUN, 120, "", falling=False)[0])


def test_a_retired_task_is_shown_as_such_and_a_resume_says_what_would_bring_it_back() -> None:
    run = run_status(task_status("math", is_retired=True, batch_groups=0))
    assert task_rows(run, 120)[1]["math"][-1] == "retired"
    change = change_of(run, Order.RUN, "task", "math")
    assert not change.is_possible
    assert change.text == (
        "Nothing changes: it already runs; it is retired, and `rollq set math batch_groups=N` brings it back."
    )


def test_rates_are_between_two_rows_and_a_rewind_is_not_a_negative_one() -> None:
    assert per_second([row(0, 0, 100), row(10, 0, 300), row(30, 0, 200), row(40, 0, 200)], "tokens") == [20.0, 0.0, 0.0]


def test_a_chart_goes_from_0_to_its_largest_value_and_shows_the_newest_ones() -> None:
    assert chart("ready groups", [0.0, 4.0, 8.0], 80) == f"ready groups   {BARS[4]}{BARS[8]} 8.0"
    assert chart("ready groups", [float(value) for value in range(100)], 40).count("█") > 0
    assert len(chart("tokens/s", [123_456.7] * 1000, 80)) <= 80
    assert chart("tokens/s", [0.0, 0.0], 80).endswith(" 0.0")


def test_charts_say_when_there_is_no_history() -> None:
    assert charts([], 80) == charts([row(0, 1, 1)], 80)
    assert "no history yet" in charts([], 80)[0]
    assert [line.split()[0] for line in charts([row(0, 1, 1), row(10, 2, 2)], 80)] == ["ready", "groups/s", "tokens/s"]


def test_a_question_says_what_will_change() -> None:
    change = change_of(RUN, Order.PAUSE, "task", "math")
    assert change.title == "Pause task math?"
    assert change.is_possible
    assert change.text.startswith("run -> pause. Nothing new is admitted or leased: 4 pending groups wait. 13 running")
    assert "17 groups on the way" in change_of(RUN, Order.DRAIN, "task", "math").text
    assert change_of(RUN, Order.RUN, "task", "code").text.startswith("done -> run. ")
    assert "The 3 groups that it holds" in change_of(RUN, Order.PAUSE, "worker", "b").text
    assert "stops once the 5 groups" in change_of(RUN, Order.DRAIN, "worker", "a").text
    assert "It is dead" in change_of(RUN, Order.RUN, "worker", "c").text


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("control", list(Control))
def test_a_question_is_asked_where_something_changes_and_only_there(order: Order, control: Control) -> None:
    change = change_of(run_status(task_status("math", control=control.value)), order, "task", "math")
    changes = control is not Control.SLEEP and not why_not(control, order, named=True)
    assert not (changes and control is CONTROLS[order][0])
    assert change.is_possible is changes
    assert ("->" in change.text) is changes
