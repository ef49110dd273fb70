"""Rates over the last minute, from totals that only grow."""

from rollq.workers.groups.rates import LastMinute


def totals(tokens: float, samples: float = 0) -> dict[str, float]:
    return {"tokens": tokens, "samples": samples}


def test_a_rate_is_that_of_the_last_minute_and_not_of_the_last_second() -> None:
    last = LastMinute(0.0, totals(0))
    for second in range(1, 301):
        last.note(second, totals(1000 * (second // 10)))  # tokens come in bursts
    assert last.per_s("tokens") == 100


def test_before_a_minute_is_over_the_rate_is_that_since_the_start() -> None:
    last = LastMinute(100.0, totals(50))
    assert last.per_s("tokens") == 0
    last.note(110.0, totals(250))
    assert last.per_s("tokens") == 20


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    last = LastMinute(0.0, totals(0))
    last.note(1.0, totals(1_000_000))
    for second in range(2, 200):
        last.note(second, totals(1_000_000))
    assert last.per_s("tokens") == 0


def test_a_ratio_is_of_what_grew() -> None:
    last = LastMinute(0.0, totals(0, 0))
    last.note(1.0, totals(0, 0))
    assert last.ratio("tokens", of="samples") is None
    last.note(2.0, totals(30, 3))
    assert last.ratio("tokens", of="samples") == 10
