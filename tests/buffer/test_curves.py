"""Numbers by train step: what a report may bring, what the server keeps of it, and for how long."""

from itertools import pairwise
from math import inf
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError, FencedError
from rollq.buffer.store.keys import RunKeys
from rollq.buffer.values.curves import LINES, MOST_NUMBERS, MOST_ROW_BYTES, labels_of, numbers_of
from rollq.buffer.values.step_rows import FULL_ROWS, THINNED_ROWS, StepRows, thinned
from support.buffer_run import World

LINE = {
    "step": 3,
    "reward": 0.25,
    "rewards": {"math": 0.5, "code": 0.0},
    "parts": {"math": {"format": 1 / 3}},
    "response_length": {"mean": 12.5, "p95": 30, "max": 31},
    "workers": {"gpu0": 4},
    "loss": float("nan"),
}


LENGTHS = {"response_length": {"max": 31}}


@pytest.fixture
def world(buffer: Buffer) -> World:
    return World(buffer).start(math={})


def steps(rows: StepRows) -> list[int]:
    return [row.step for row in rows.steps]


def test_numbers_have_the_names_of_the_table() -> None:
    found = numbers_of(LINE)
    assert found == {
        "reward": 0.25,
        "rewards/math": 0.5,
        "rewards/code": 0.0,
        "parts/math/format": 0.333333,
        "response_length/mean": 12.5,
        "response_length/p95": 30.0,
        "response_length/max": 31.0,
    }
    assert all(any(labels_of(name, line) is not None for line in LINES) for name in found)


def test_a_name_with_slashes_is_still_a_part() -> None:
    (name,) = numbers_of({"parts": {"math": {"a/b": 1.0}}})
    assert [labels for line in LINES if (labels := labels_of(name, line))] == [("math", "a/b")]


@pytest.mark.parametrize("value", ["1", None, True, [1.0], float("inf"), float("nan"), 10**400, {}, 1e301])
def test_what_is_no_finite_number_has_no_curve(value: Any) -> None:
    assert numbers_of({"reward": value, "rewards": value, "parts": {"math": value}}) == {}


def test_a_row_is_bounded_and_keeps_what_every_run_has() -> None:
    parts = {f"task{index}": {f"{'x' * 60}{part}": 1.0 for part in range(50)} for index in range(50)}
    found = numbers_of({"parts": parts, "reward": 0.5, "rewards": dict.fromkeys(parts, 0.5), "publish_s": 1.0})
    assert {"reward", "publish_s", "rewards/task0"} <= found.keys()
    assert "response_length/max" in numbers_of({"rewards": dict.fromkeys(map(str, range(200)), 0.5), **LENGTHS})
    assert len(found) <= MOST_NUMBERS
    assert sum(len(name) for name in found) < MOST_ROW_BYTES


def test_reports_and_evaluations_are_kept_by_step(world: World) -> None:
    buffer, held = world.buffer, world.held
    buffer.report_trainer(held, LINE)
    buffer.report_trainer(held, {"step": 4, "reward": 0.5})
    buffer.report_evaluations(held, 0, {"held_out": 0.125, "hard": float("nan")})
    buffer.report_evaluations(held, 0, {"hard": 0.0})
    found = buffer.curves()
    assert steps(found) == [3, 4]
    assert found.steps[0].numbers == numbers_of(LINE)
    assert abs(found.steps[0].time_s - buffer.server_ms() / 1000) < 60
    assert [(row.step, row.numbers) for row in found.evaluations] == [(0, {"held_out": 0.125, "hard": 0.0})]
    report = buffer.trainer()
    assert report is not None
    assert report["step"] == 4


def test_partial_reports_of_a_step_are_put_together(world: World) -> None:
    world.buffer.report_trainer(world.held, {"step": 1, "reward": 0.5, "loss": 2.0})
    world.buffer.report_trainer(world.held, {"step": 1, "loss": 1.0, "entropy": 3.0})
    (row,) = world.buffer.curves().steps
    assert row.numbers == {"reward": 0.5, "loss": 1.0, "entropy": 3.0}


def test_numbers_that_a_row_has_no_room_for_are_left_out(world: World) -> None:
    many = {f"held_out_{index:03}_{'x' * 30}": 0.5 for index in range(200)}
    world.buffer.report_evaluations(world.held, 3, {"first": 0.25})
    world.buffer.report_evaluations(world.held, 3, {**many, "first": 0.75})
    world.buffer.report_evaluations(world.held, 3, {"first": 1.0})
    (row,) = world.buffer.curves().evaluations
    assert row.numbers["first"] == 1.0
    assert 50 < len(row.numbers) < 200
    assert len(world.buffer.client.zrange(world.buffer.keys.evaluations, 0, 0)[0]) < MOST_ROW_BYTES + 50
    odd = {"\x01/\N{GRINNING FACE}" * 21 + str(index): 0.123456 for index in range(16)}
    world.buffer.report_trainer(world.held, {"step": 4, "reward": 0.5, "parts": {"math": odd}})
    (row,) = world.buffer.curves().steps
    assert {"reward", f"parts/math/{next(iter(odd))}"} <= row.numbers.keys()


@pytest.mark.parametrize("step", [None, "3", 3.0, True, -1, 10**15])
def test_a_report_without_a_step_has_no_row(world: World, step: Any) -> None:
    world.buffer.report_trainer(world.held, {"step": step, "reward": 0.5})
    world.buffer.report_trainer(world.held, {"reward": 0.5})
    assert world.buffer.curves() == StepRows()
    assert world.buffer.trainer() is not None


@pytest.mark.parametrize(
    ("report", "problem"),
    [({"step": 1, "x": object()}, "must be valid JSON"), ({"step": 1, "x": "x" * (1 << 20)}, "is too large")],
)
def test_a_report_that_is_not_json_or_huge_is_refused(world: World, report: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        world.buffer.report_trainer(world.held, report)
    assert world.buffer.trainer() is None


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("workers", 1, "reward", 1.0), "one of curves, evaluations"),
        (("curves", -1, "reward", 1.0), "whole number"),
        (("curves", 1, "reward", "nan"), "finite number"),
        (("curves", 1, "reward", "1e999"), "finite number"),
        (("curves", 1, "reward"), "in a row"),
    ],
)
def test_the_server_refuses_what_no_trainer_sends(world: World, args: tuple[Any, ...], problem: str) -> None:
    buffer, held = world.buffer, world.held
    fence = (buffer.incarnation, held.epoch, held.nonce)
    with pytest.raises(Exception, match=problem):
        buffer.call("report_trainer", buffer.keys.info, *fence, "{}", *args)
    assert buffer.curves() == StepRows()
    assert buffer.trainer() is None


def test_rows_that_somebody_else_has_written_hide_no_other(world: World) -> None:
    keys = RunKeys(world.buffer.run)
    forged: dict[bytes, float] = {b"1 2 {}": inf, b"1 " + b"9" * 400 + b" {}": 7}
    forged |= {
        b"\xff": 1,
        b"1 2 {": 2,
        b"x y {}": 3,
        b"1 5000 [1, 2]": 4,
        b'5 6000 {"reward":"high","loss":1e999}': 5,
    }
    world.buffer.client.zadd(keys.curves, forged)
    world.buffer.report_trainer(world.held, {"step": 6, "reward": 0.5})
    world.buffer.report_trainer(world.held, {"step": 2, "reward": 0.25})
    assert [(row.step, row.numbers) for row in world.buffer.curves().steps if row.numbers] == [
        (2, {"reward": 0.25}),
        (6, {"reward": 0.5}),
    ]


def test_a_trainer_that_goes_back_replaces_later_steps(world: World) -> None:
    for step in range(1, 6):
        world.buffer.report_trainer(world.held, {"step": step, "reward": step / 10})
        world.buffer.report_evaluations(world.held, step, {"held_out": step / 10})
    before = world.held
    world.begin(0, launch_id="second")
    with pytest.raises(FencedError):
        world.buffer.report_trainer(before, {"step": 6, "reward": 1.0})
    assert world.buffer.curves() == StepRows()
    world.buffer.report_trainer(world.held, {"step": 1, "reward": 0.75})
    assert steps(world.buffer.curves()) == [1]


def test_older_rows_are_thinned_by_their_position(world: World) -> None:
    total = 2 * (FULL_ROWS + THINNED_ROWS)
    for step in range(1, 2 * total, 2):  # of a loop that reports every second step
        world.buffer.report_trainer(world.held, {"step": step, "reward": 0.5})
    kept = steps(world.buffer.curves())
    assert len(kept) <= FULL_ROWS + THINNED_ROWS
    assert kept[-FULL_ROWS:] == list(range(2 * total - 2 * FULL_ROWS + 1, 2 * total, 2))
    older = kept[:-FULL_ROWS]
    assert older[0] == 1
    assert {after - before for before, after in pairwise(older)} == {8}


def test_the_bound_holds_whatever_was_there(world: World) -> None:
    key = RunKeys(world.buffer.run).curves
    rows = {f"1 2000 {{}} {step}": step for step in range(3 * (FULL_ROWS + THINNED_ROWS))}
    world.buffer.client.zadd(key, rows)
    world.buffer.report_trainer(world.held, {"step": 10**6, "reward": 0.5})
    assert world.buffer.client.zcard(key) <= FULL_ROWS + THINNED_ROWS


def test_thinning_for_a_chart_keeps_both_ends() -> None:
    assert thinned(range(5), 10) == range(5)
    picked = thinned(range(12_345), 1000)
    assert (len(picked), picked[0], picked[-1]) == (1000, 0, 12_344)
