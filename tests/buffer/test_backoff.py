from rollq.buffer.common.backoff import backoff_s


def test_pauses_double_up_to_the_longest() -> None:
    pauses_s = [backoff_s(failures, first_s=0.05, longest_s=1.0, jitter=0.0) for failures in (1, 2, 3, 6, 5000)]
    assert pauses_s == [0.05, 0.1, 0.2, 1.0, 1.0]


def test_jitter_takes_up_to_half_of_a_pause_away() -> None:
    assert backoff_s(4, first_s=0.05, longest_s=1.0, jitter=1.0) == 0.2
