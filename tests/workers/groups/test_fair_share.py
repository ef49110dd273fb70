"""How many groups a worker may hold, beside the others of its fleet."""

from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollq.buffer.calls.orders import Fleet
from rollq.buffer.calls.replies.tasks import UnderWay
from rollq.workers.groups.fair_share import (
    ALIKE,
    PATIENCE_S,
    REST_S,
    allowance,
    counted_speed,
    denied_for_s,
    share_of,
)


def shared(groups: int, shares: Sequence[float], places: Sequence[int] | None = None) -> tuple[list[int], float]:
    """What workers with these shares hold when all of `groups` are held, and when that is, in seconds.

    Each asks again as soon as it may, the first one first; one with all of its `places` taken does not.
    """
    held, denied_s = [0] * len(shares), [0.0] * len(shares)
    for tick in count():
        now_s = tick * REST_S / 10
        for worker, share in enumerate(shares):
            under_way = UnderWay(groups - sum(held), sum(held))
            free = groups if places is None else places[worker] - held[worker]
            held[worker] += min(free, allowance(under_way, held[worker], share, now_s - denied_s[worker]))
        if sum(held) == groups:
            return held, now_s
    raise AssertionError


def test_equal_workers_share_a_batch_equally_and_at_once() -> None:
    assert shared(64, [1 / 4] * 4) == ([16] * 4, 0.0)
    assert shared(64, [1 / 8] * 8) == ([8] * 8, 0.0)


def test_a_worker_alone_takes_all() -> None:
    assert shared(64, [1.0]) == ([64], 0.0)


def test_workers_take_in_proportion_to_what_they_can_do() -> None:
    held, after_s = shared(45, [2 / 4.5, 1 / 4.5, 1 / 4.5, 0.5 / 4.5])
    assert (held, after_s) == ([20, 10, 10, 5], 0.0)


def test_the_rest_goes_to_those_that_are_owed_the_largest_part_of_it() -> None:
    held, after_s = shared(10, [0.29, 0.27, 0.24, 0.2])  # 2.9, 2.7, 2.4, 2.0
    assert held == [3, 3, 2, 2]
    assert after_s <= REST_S


def test_fewer_groups_than_workers_go_to_one_each() -> None:
    held, after_s = shared(3, [1 / 8] * 8)
    assert sorted(held) == [0] * 5 + [1] * 3
    assert after_s <= REST_S


def test_a_share_that_nobody_takes_is_everybodys_after_a_moment() -> None:
    held, after_s = shared(64, [1 / 4, 1 / 4, 1 / 4])  # the fourth is dead, and the fleet does not know yet
    assert max(held) - min(held) <= 4
    assert after_s < 4 * PATIENCE_S


def test_a_fully_used_worker_takes_nothing_beyond_its_share() -> None:
    under_way = UnderWay(20, 80)
    assert allowance(under_way, 10, 0.1, waited_s=60.0, gain=0.1) == 0
    assert allowance(under_way, 10, 0.1, waited_s=60.0, gain=0.9) == 20
    assert allowance(under_way, 9, 0.1, waited_s=0.0, gain=0.1) == 1  # its share it does take
    assert allowance(under_way, 0, 0.001, waited_s=0.0, gain=0.1) == 1  # and a worker without work, a group


def test_what_full_workers_cannot_take_goes_to_the_one_with_room_within_seconds() -> None:
    held, after_s = shared(64, [1 / 8] * 8, places=[2] * 7 + [100])
    assert held == [2] * 7 + [50]
    assert after_s < 5 * PATIENCE_S


@given(st.integers(0, 300), st.lists(st.floats(0.01, 10), min_size=1, max_size=12))
def test_no_share_lets_a_group_wait_for_long(groups: int, speeds: list[float]) -> None:
    shares = [speed / sum(speeds) for speed in speeds]
    held, after_s = shared(groups, shares)
    assert sum(held) == groups
    assert after_s < 10 * PATIENCE_S
    if groups and after_s <= REST_S:
        assert all(has <= groups * share + 1.1 for has, share in zip(held, shares, strict=True))


@given(st.integers(1, 100), st.integers(0, 100), st.integers(0, 50), st.floats(0.01, 1), st.floats(0, 20))
def test_a_denied_worker_is_told_when_to_ask_again(
    pending: int, running: int, held: int, share: float, waited_s: float
) -> None:
    under_way = UnderWay(pending, running)
    again_s = denied_for_s(under_way, held, share, waited_s)
    assert 0 < again_s <= PATIENCE_S
    assert allowance(under_way, held, share, waited_s + 1e6) >= 1  # however long it has waited
    if not allowance(under_way, held, share, waited_s):
        assert allowance(under_way, held, share, waited_s + again_s + 1e-6)


def test_the_share_of_a_worker_whose_speed_is_unknown_is_that_of_its_places() -> None:
    assert share_of(Fleet(workers=4, new_places=400), 100, 0.0) == 1 / 4
    others = Fleet(workers=3, measured_places=200, tokens_per_s=2000, new_places=100)
    assert share_of(others, 100, 0.0) == pytest.approx(1 / 3)


def test_a_worker_that_is_twice_as_fast_has_twice_the_share() -> None:
    fleet = Fleet(workers=2, measured_places=512, tokens_per_s=3000)
    assert share_of(fleet, 256, 2000.0) == pytest.approx(2 / 3)
    assert share_of(fleet, 256, 1000.0) == pytest.approx(1 / 3)


def test_a_fleet_that_has_not_heard_of_a_worker_leaves_it_everything() -> None:
    assert share_of(Fleet(), 256, 0.0) == 1.0


def test_speeds_that_are_alike_count_as_equal() -> None:
    fleet = Fleet(workers=4, measured_places=400, tokens_per_s=4000)
    assert counted_speed(fleet, 100, 1000 * (1 + ALIKE / 2)) == 1000
    assert counted_speed(fleet, 100, 1000 * (1 + 2 * ALIKE)) == 1000 * (1 + 2 * ALIKE)
    assert counted_speed(fleet, 100, 0.0) == 0.0
    assert counted_speed(Fleet(), 100, 1234.0) == 1234.0
