"""Which samples a worker leaves to others: the pure rules."""

import pytest

from rollq.buffer.calls.orders import Fleet
from rollq.buffer.calls.replies.tasks import UnderWay
from rollq.workers.engines.speed import EngineSpeed
from rollq.workers.groups.spread import (
    Spare,
    beforehand,
    borrowed_share,
    chosen,
    may_pay,
    part_of,
    ratio_elsewhere,
    surplus,
)


def fleet(workers: int, places: int, open_samples: int, tokens_per_s: int = 0) -> Fleet:
    measured = places * workers if tokens_per_s else 0
    return Fleet(workers, measured, tokens_per_s, places * workers - measured, open_samples, open_samples)


def engine(full: int, tokens_per_s: float, *seen: int) -> EngineSpeed:
    """What is known of a GPU that runs `full` sequences at this speed each, after it has had these numbers of them."""
    speed = EngineSpeed()
    for sequences in seen:
        pace = tokens_per_s * min(1.0, full / sequences)
        speed.note(2000, 2000 / pace, sequences)
    return speed


def test_a_worker_keeps_its_part_of_all_samples() -> None:
    assert surplus(fleet(4, 256, 512), 0.25, 512, 256) == 384
    assert surplus(fleet(4, 256, 512), 0.25, 128, 256) == 0
    assert surplus(fleet(8, 256, 3), 0.125, 3, 256) == 2


def test_a_fleet_that_has_not_heard_of_the_samples_counts_them() -> None:
    assert surplus(fleet(2, 256, 0), 0.5, 100, 256) == 50


def test_no_more_is_given_up_than_the_others_have_places_for() -> None:
    assert surplus(fleet(2, 4, 100), 0.5, 100, 4) == 4
    assert surplus(fleet(2, 4, 103), 0.5, 100, 4) == 1
    assert surplus(fleet(2, 4, 104), 0.5, 100, 4) == 0


@pytest.mark.parametrize(("workers", "share"), [(1, 1.0), (0, 0.0), (4, 0.0)])
def test_a_worker_alone_or_without_a_share_gives_nothing_up(workers: int, share: float) -> None:
    assert surplus(fleet(workers, 256, 512), share, 512, 256) == 0


def test_a_slow_machine_is_left_for_a_faster_one() -> None:
    slow = engine(64, 10.0, 16, 32, 64)
    mine = slow.tokens_per_s(8)
    others = round(3 * 4 * mine)
    assert ratio_elsewhere(fleet(4, 256, 8, others + round(mine)), slow, mine, 8) == pytest.approx(4, rel=0.05)


def test_equal_machines_with_little_to_do_keep_what_runs() -> None:
    """Eight sequences are as fast each as two are."""
    speed = engine(1000, 10.0, 2, 8, 32)
    mine = speed.tokens_per_s(8)
    assert ratio_elsewhere(fleet(4, 256, 8, round(4 * mine)), speed, mine, 8) == pytest.approx(1, rel=0.1)


def test_an_overloaded_machine_is_relieved_by_equal_ones() -> None:
    speed = engine(64, 10.0, 128, 256)
    mine = speed.tokens_per_s(128)
    assert ratio_elsewhere(fleet(4, 256, 256, round(4 * mine)), speed, mine, 256) == pytest.approx(3.4, rel=0.1)


def test_nothing_is_known_of_a_new_worker() -> None:
    assert ratio_elsewhere(fleet(4, 256, 8, 1000), EngineSpeed(), 0.0, 8) == 0.0
    assert ratio_elsewhere(fleet(2, 256, 8, 1000), engine(64, 10.0, 64), 1000.0, 8) == 0.0
    assert ratio_elsewhere(Fleet(), engine(64, 10.0, 64), 1000.0, 8) == 0.0


def test_a_worker_leaves_what_is_beyond_its_part_of_few_groups_to_others() -> None:
    part = part_of(UnderWay(1, 1), 0.25, 256)
    assert part == 128
    assert beforehand(256, part) == 128
    assert beforehand(140, part) == 0


def test_it_does_not_where_nothing_is_gained() -> None:
    assert may_pay(gain=0.1, sample_s=30.0)
    assert not may_pay(gain=0.9, sample_s=30.0)
    assert not may_pay(gain=0.1, sample_s=0.2)


def test_those_with_the_fewest_tokens_go_first() -> None:
    spare = [Spare(0, 0, 500), Spare(0, 1, 20), Spare(1, 0, 0), Spare(1, 3, 20)]
    assert chosen(spare, 3) == [Spare(1, 0, 0), Spare(0, 1, 20), Spare(1, 3, 20)]
    assert chosen(spare, 0) == []


def test_the_others_share_what_one_offers() -> None:
    assert borrowed_share(fleet(4, 256, 0), 0.25) == pytest.approx(1 / 3)
    assert borrowed_share(fleet(2, 256, 0), 0.7) == 1.0
    assert borrowed_share(fleet(1, 256, 0), 1.0) == 0.0
