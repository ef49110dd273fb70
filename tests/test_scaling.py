"""The parts of the scaling benchmarks that only compute."""

import pytest
from benchmarks.engine_record import EngineRecord, busy_share, repeated_groups
from benchmarks.saturating import GROUP_SIZE, SampleNumbers, sample_length
from benchmarks.scaled_run import Gpu, Step, rate
from benchmarks.scaling import SPEEDS, fastest_s, heavy_tail, step_bound_s
from benchmarks.world import TASK

from rollq.workers.seeds import sample_seed, turn_seed

TEXT = "10.0 running 0\n11.0 asked 1/0\n11.0 running 1\n12.0 running 2\n14.0 running 0\n15.0 asked 2/7\n16.0 runn"


def test_a_record_of_a_killed_worker_is_read_up_to_its_last_whole_line() -> None:
    record = EngineRecord.parse(TEXT)
    assert record.running == ((10.0, 0), (11.0, 1), (12.0, 2), (14.0, 0))
    assert record.asked == ((11.0, "1/0"), (15.0, "2/7"))
    assert record.first_start_s() == 11.0
    assert record.first_start_s(13.0) is None
    assert EngineRecord.parse("").busy(0.0, 1.0, 4) == 0.0


def test_slots_are_busy_as_long_as_sequences_run_and_no_more_of_them_than_there_are() -> None:
    record = EngineRecord.parse(TEXT)
    assert record.busy(10.0, 20.0, 2) == pytest.approx((1 + 2 * 2) / 2 / 10)
    assert record.busy(13.0, 14.0, 1) == 1.0
    assert busy_share([record, EngineRecord.parse("")], 12.0, 14.0, 2) == 0.5


def test_groups_with_a_sample_that_was_asked_for_twice_are_found_across_workers() -> None:
    first = EngineRecord.parse("1.0 asked 1/0\n1.0 asked 1/1\n1.0 asked 2/0\n")
    assert repeated_groups([first]) == set()
    assert repeated_groups([first, EngineRecord.parse("2.0 asked 2/0\n2.0 asked 3/0\n")]) == {2}


def test_a_sample_is_as_long_in_every_attempt_and_siblings_differ() -> None:
    numbers = SampleNumbers(GROUP_SIZE)
    for attempt in (2, 1):
        assert numbers.of(sample_seed(0, TASK, 17, 3, attempt)) == (17, 3)
        assert numbers.of(turn_seed(sample_seed(0, TASK, 17, 3, attempt), 256), 256) == (17, 3)
    lengths = range(1, 100_000)
    assert len({sample_length(17, index, lengths) for index in range(8)}) == 8


def test_the_rate_counts_from_the_end_of_the_last_step_that_warms_up() -> None:
    steps = [Step(10.0, (1,), (50, 50)), Step(12.0, (2,), (60, 60)), Step(14.0, (3,), (80, 80))]
    assert rate(steps, 1) == 70.0


def test_the_least_time_of_a_batch_is_that_of_all_tokens_or_of_the_longest_answer() -> None:
    assert step_bound_s([100] * 9 + [400], [50.0, 50.0], 10.0) == 40.0
    assert step_bound_s([100] * 100, [50.0, 50.0], 10.0) == 100.0


def test_a_slow_engine_helps_only_if_its_first_answers_end_before_the_others_have_made_all() -> None:
    assert fastest_s(512, 800, [Gpu(200.0)] * 8) == pytest.approx(4.0)
    assert fastest_s(512, 800, [Gpu(200.0 * speed) for speed in SPEEDS]) == pytest.approx(8.0)
    assert fastest_s(5120, 800, [Gpu(200.0 * speed) for speed in SPEEDS]) == pytest.approx(5120 * 800 / 57_600)


def test_the_heavy_tail_has_the_median_of_a_reasoning_model_and_ends_at_its_99th_percentile() -> None:
    lengths = sorted(heavy_tail())
    assert lengths[len(lengths) // 2] == pytest.approx(800, rel=0.01)
    assert lengths[-1] == 20_000
    assert lengths[int(0.98 * len(lengths))] < 20_000
