"""How long an attempt may take."""

import pytest

from rollq.buffer.values.rollouts import Lease, Prompt
from rollq.workers.groups.timeouts import WARM_UP_GROUPS, AttemptTimeouts, attempt_timeout_s


def lease(task: str = "math", *, evaluation: bool = False) -> Lease:
    return Lease(task, 1, 1, "nonce", 1, Prompt("?"), (), step=1, evaluation=evaluation)


@pytest.mark.parametrize(
    ("finished", "mean_s", "timeout_s"),
    [
        (0, 0.0, 1800),
        (WARM_UP_GROUPS - 1, 10.0, 1800),
        (WARM_UP_GROUPS, 10.0, 30),
        (WARM_UP_GROUPS, 600.0, 1800),
        (WARM_UP_GROUPS, 700.0, 1800),
    ],
)
def test_tc10_the_timeout_is_three_means_once_there_are_enough(finished: int, mean_s: float, timeout_s: float) -> None:
    assert attempt_timeout_s(1800, finished, mean_s) == timeout_s


def test_tc10_evaluations_are_left_out_of_the_mean_and_get_all_the_time_that_is_set() -> None:
    timeouts = AttemptTimeouts(1800, dynamic=True)
    for _ in range(WARM_UP_GROUPS):
        timeouts.note(lease(), 10)
        timeouts.note(lease(evaluation=True), 500)
    assert timeouts.of(lease()) == 30
    assert timeouts.of(lease(evaluation=True)) == 1800
    assert timeouts.of(lease("code")) == 1800, "another task's groups take another time"


def test_tc10_a_timeout_that_is_not_dynamic_stays_as_set() -> None:
    timeouts = AttemptTimeouts(1800)
    for _ in range(WARM_UP_GROUPS):
        timeouts.note(lease(), 10)
    assert timeouts.of(lease()) == 1800
