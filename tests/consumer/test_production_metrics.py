"""What was produced since the last step, in numbers for people."""

import pytest

from rollq.buffer.calls.replies.tasks import Production
from rollq.consumer.production import describe_production, summarise_times, together


@pytest.mark.parametrize(
    ("timings_ms", "expected"),
    [
        ([], {"count": 0}),
        ([2000], {"count": 1, "mean": 2.0, "p50": 2.0, "p99": 2.0}),
        ([3000, 1000], {"count": 2, "mean": 2.0, "p50": 3.0, "p99": 3.0}),
        (list(range(1000, 0, -1)), {"count": 1000, "mean": 0.5005, "p50": 0.501, "p99": 0.991}),
    ],
)
def test_xp07_times_of_groups_have_count_mean_p50_and_p99(timings_ms: list[int], expected: dict[str, float]) -> None:
    assert summarise_times(timings_ms) == pytest.approx(expected)


def test_xp07_rates_and_sums_are_of_what_was_taken() -> None:
    sums = {"completed": 3, "filtered": 1, "tokens": 80, "reward_sum": 3.0, "reward_count": 4}
    assert describe_production(Production(4.0, sums, (1000,))) == {
        "groups": {"completed": 3, "filtered": 1},
        "tokens_per_s": 20.0,
        "reward": 0.75,
        "group_generate_time_s": {"count": 1, "mean": 1.0, "p50": 1.0, "p99": 1.0},
    }
    assert describe_production(Production(0.0, {}, ())) == {
        "groups": {}, "tokens_per_s": 0.0, "reward": None, "group_generate_time_s": {"count": 0},
    }  # fmt: skip


def test_the_production_of_shards_is_that_of_their_task() -> None:
    shards = [Production(4.0, {"completed": 3, "tokens": 80}, (1, 2)), Production(5.0, {"tokens": 20}, (3,))]
    assert together(shards) == Production(5.0, {"completed": 3, "tokens": 100}, (1, 2, 3))
