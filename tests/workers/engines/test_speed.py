"""How fast an engine is, from the requests that it has answered."""

from collections.abc import Callable

import pytest

from rollq.workers.engines.speed import FARTHEST, LEAST_TOKENS, EngineSpeed, RequestClock


def seen(step_s: Callable[[float], float], *loads: float, tokens: int = 10_000) -> EngineSpeed:
    """The speed of an engine whose decoding steps of n sequences take `step_s(n)`, after requests at these loads."""
    speed = EngineSpeed()
    for load in loads:
        speed.note(tokens, tokens * step_s(load), load)
    return speed


def bounded(n: float) -> float:
    """A step of an engine that is fully used by 64 sequences."""
    return max(1.0, n / 64) / 200


def linear(n: float) -> float:
    """A step that reads weights for 5 ms, and takes 0.1 ms for each sequence."""
    return 0.005 + 0.0001 * n


def test_the_speed_is_known_at_loads_that_were_seen() -> None:
    assert seen(linear, 10, 100).tokens_per_s(50) == pytest.approx(50 / linear(50), rel=0.05)
    assert seen(bounded, 128, 120, 136).tokens_per_s(128) == pytest.approx(12_800, rel=0.05)


def test_equal_engines_with_unequal_loads_count_as_equally_fast() -> None:
    busy, idle = seen(linear, 30, 120, 60), seen(linear, 10, 40, 20)
    assert busy.tokens_per_s(40) == pytest.approx(idle.tokens_per_s(40), rel=0.1)


def test_an_engine_that_is_twice_as_fast_counts_twice() -> None:
    fast = seen(lambda n: linear(n) / 2, 30, 120)
    assert fast.tokens_per_s(60) == pytest.approx(2 * seen(linear, 30, 120).tokens_per_s(60), rel=0.01)


def test_a_described_speed_is_that_of_a_step_up_to_the_most_sequences_that_were_seen() -> None:
    found = seen(linear, *range(10, 121, 10)).described(256)
    assert found is not None
    assert found["places"] == 120
    assert (found["step_s"], found["sample_step_s"]) == pytest.approx((0.005, 0.0001), rel=0.1)
    assert EngineSpeed().described(256) is None


def test_a_described_speed_of_one_load_is_that_of_the_sequences_together() -> None:
    found = seen(bounded, 256, 256).described(128)
    assert found == {"step_s": 0.0, "sample_step_s": pytest.approx(1 / 12_800, rel=0.001), "places": 128}


def test_the_speed_far_beyond_the_loads_that_were_seen_is_not_known() -> None:
    speed = seen(linear, 10)
    assert speed.tokens_per_s(10) > 0
    assert speed.tokens_per_s(10 * FARTHEST + 1) == 0.0


def test_a_speed_is_not_known_from_a_few_tokens() -> None:
    assert seen(linear, 10, tokens=LEAST_TOKENS - 1).tokens_per_s(10) == 0.0
    assert EngineSpeed().tokens_per_s(10) == 0.0
    assert EngineSpeed().mean_sequences == 0.0


def test_more_sequences_gain_as_much_as_an_engine_reads_weights() -> None:
    speed = seen(linear, 10, 100)  # 5 ms for the weights, 0.1 ms for each sequence
    assert speed.gain(1) == pytest.approx(0.98, abs=0.02)
    assert speed.gain(50) == pytest.approx(0.5, abs=0.02)
    assert speed.gain(450) == pytest.approx(0.1, abs=0.02)


def test_more_sequences_gain_nothing_for_a_full_engine_and_may_for_an_unknown_one() -> None:
    assert seen(bounded, 128, 256).gain(200) == pytest.approx(0.0, abs=0.02)
    assert seen(bounded, 256).gain(256) == 0.0  # nothing says that it would be faster
    assert EngineSpeed().gain(10) == 1.0


def test_an_engine_that_has_become_slow_is_soon_known_as_slow() -> None:
    speed = seen(linear, *[50] * 40)
    for _ in range(300):
        speed.note(10_000, 10_000 * 3 * linear(50), 50)
    assert speed.tokens_per_s(50) == pytest.approx(50 / linear(50) / 3, rel=0.1)


def test_requests_without_tokens_say_nothing() -> None:
    speed = seen(linear, 10)
    before = speed.tokens_per_s(10)
    speed.note(0, 5.0, 10)
    speed.note(10, 0.0, 10)
    assert speed.tokens_per_s(10) == before


def test_requests_are_timed_beside_those_that_run_at_the_same_time() -> None:
    now_s = 0.0
    clock = RequestClock(lambda: now_s)
    with clock.request() as got:
        now_s = 1.0
        with clock.request() as got_too:
            now_s = 3.0
            got_too(2_000)
        now_s = 4.0
        got(4_000)
    # the first ran for 4 s, 2 of them beside the second, which had the first beside it all the time
    assert clock.speed.mean_sequences == pytest.approx((2_000 * 2.0 + 4_000 * 1.5) / 6_000, rel=0.01)
    assert clock.speed.tokens_per_s(1.5) == pytest.approx(1.5 * 1_000, rel=0.01)
