"""A batch is shared over tasks by their weights, and sizes may change by step."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollq.buffer.rules.batch_sizes import groups_at, groups_through, is_retired, share_by_weight

WEIGHTS = st.lists(
    st.tuples(st.text("abc", min_size=1, max_size=5), st.floats(0, 1e6, allow_nan=False)),
    min_size=1, max_size=8, unique_by=lambda pair: pair[0],
).filter(lambda pairs: any(weight for _, weight in pairs))  # fmt: skip


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [
        (7, {"a": 2, "b": 1, "c": 0}, {"a": 5, "b": 2, "c": 0}),
        (1, {"a": 1, "b": 1}, {"a": 1, "b": 0}),
        (1, {"b": 1, "a": 1}, {"b": 1, "a": 0}),
        (10, {"a": 1, "b": 1, "c": 1}, {"a": 4, "b": 3, "c": 3}),
        (3, {"a": 0.1, "b": 0.2}, {"a": 1, "b": 2}),
        (0, {"a": 1}, {"a": 0}),
        (5, {"a": 0.5}, {"a": 5}),
        # shares of 2.5 and 7.5: the tie goes to the first
        (10, {"a": 1, "b": 3}, {"a": 3, "b": 7}),
    ],
)
def test_xp09_a_batch_is_split_by_the_largest_remainder(
    total: int, weights: dict[str, float], shares: dict[str, int]
) -> None:
    assert share_by_weight(total, list(weights.items())) == shares


@settings(deadline=None)
@given(st.integers(0, 1000), WEIGHTS)
def test_xp09_every_task_gets_its_share_to_within_one_and_all_is_shared(
    total: int, weights: list[tuple[str, float]]
) -> None:
    shares = share_by_weight(total, weights)
    together = sum(weight for _, weight in weights)
    assert sum(shares.values()) == total
    assert list(shares) == [name for name, _ in weights]
    for name, weight in weights:
        exact = total * weight / together
        assert math.floor(exact - 1e-6) <= shares[name] <= math.ceil(exact + 1e-6)
        assert weight or not shares[name]


@pytest.mark.parametrize(
    ("total", "weights", "message"),
    [
        (-1, [("a", 1.0)], "-1 groups cannot be shared: must be 0 or more"),
        (7, [("a", 1.0), ("b", 1.0), ("a", 2.0)], "task 'a' is listed twice"),
        (7, [("a", 1.0), ("b", -0.5)], "task 'b': weight -0.5 must be a number, 0 or more"),
        (7, [("a", math.nan)], "task 'a': weight nan"),
        (7, [("a", math.inf)], "task 'a': weight inf"),
        (7, [("a", 0.0), ("b", 0.0)], "the weights of 'a', 'b' are all 0: at least one must be positive"),
        (7, [], "the weights of no tasks are all 0"),
    ],
)
def test_xp09_weights_that_make_no_sense_are_refused(
    total: int, weights: list[tuple[str, float]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        share_by_weight(total, weights)


@pytest.mark.parametrize(("step", "groups"), [(1, 4), (2, 4), (3, 10), (4, 10), (5, 0), (6, 0), (7, 1), (99, 1)])
def test_sizes_change_from_their_step_on(step: int, groups: int) -> None:
    schedule = ((3, 10), (5, 0), (7, 1))
    assert groups_at(4, schedule, step) == groups
    assert groups_through(4, schedule, step) - groups_through(4, schedule, step - 1) == groups


def test_nothing_is_taken_by_no_steps() -> None:
    assert groups_through(4, ((1, 9),), 0) == 0
    assert groups_through(4, ((1, 9),), 1) == 9


@pytest.mark.parametrize(
    ("batch_groups", "schedule", "step", "is_so"),
    [
        (4, (), 1, False),
        (4, ((5, 0),), 4, False),
        (4, ((5, 0),), 5, True),
        (4, ((5, 0), (9, 2)), 5, False),
        (0, ((5, 4), (9, 0)), 1, False),
        (0, ((5, 4), (9, 0)), 9, True),
    ],
)
def test_a_task_is_retired_when_no_batch_from_now_on_takes_groups(
    batch_groups: int, schedule: tuple[tuple[int, int], ...], step: int, is_so: bool
) -> None:
    assert is_retired(batch_groups, schedule, step) is is_so
