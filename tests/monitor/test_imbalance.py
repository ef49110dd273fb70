"""One sentence when workers are idle while others hold most of the groups, and none at the end of a batch."""

from typing import Any

import pytest

from rollq.buffer.values.rollouts import Status
from rollq.monitor.status.diagnosis import diagnose
from rollq.monitor.status.imbalance import imbalance
from rollq.monitor.status.read import RunStatus
from support.run_statuses import run_status, task_status, trainer_state, waiting, worker


def uneven(*held: int, pending: int = 0, **changes: Any) -> RunStatus:
    """A run whose trainer waits for 64 groups, and whose workers gpu0, gpu1, ... hold so many."""
    statuses = {Status.PENDING: pending, Status.RUNNING: sum(held)}
    return run_status(
        task_status(batch_groups=64, statuses=statuses, limit=1000),
        **{
            "trainer": waiting({"math": (0, 64)}),
            "workers": {f"gpu{number}": worker(groups) for number, groups in enumerate(held)},
            **changes,
        },
    )


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (uneven(0, 61, 0, 0, pending=3), "3 of 4 workers idle while gpu1 holds 61 of 64 groups"),
        (uneven(64, 0), "1 of 2 workers idle while gpu0 holds 64 of 64 groups"),
        (uneven(30, 34, 0, 0), "2 of 4 workers idle while gpu1 and gpu0 hold 64 of 64 groups"),
        (uneven(16, 16, 16, 16, 0, 0, 0, 0), "4 of 8 workers idle while 4 workers hold 64 of 64 groups"),
        (uneven(16, 16, 16, 16), ""),
        (uneven(16, 18, 16, 0, pending=14), ""),  # nobody holds too much
        (uneven(2, 50, 2, 2), ""),  # nobody is idle
        (uneven(0, 12, 6, 1), ""),  # the end of a batch
        (uneven(0, 32, 0, 0), ""),
        (uneven(64), ""),
        (uneven(), ""),
        (uneven(0, 61, pending=3, trainer=trainer_state()), ""),  # it has its batch
        (uneven(0, 61, pending=3, trainer=None), ""),
    ],
)
def test_it_is_said_who_holds_the_groups_while_others_are_idle(run: RunStatus, sentence: str) -> None:
    assert imbalance(run) == sentence


@pytest.mark.parametrize(
    "report",
    [worker(state="paused"), worker(state="asleep"), worker(condition="dead"), worker(idle_s=1.0), worker(idle_s=None)],
)
def test_a_worker_that_may_take_nothing_or_has_just_become_idle_is_not_meant(report: dict[str, Any]) -> None:
    assert imbalance(uneven(64, workers={"gpu0": worker(64), "gpu1": report})) == ""


def test_the_diagnosis_says_it_and_what_to_look_at() -> None:
    found = diagnose(uneven(0, 61, 0, 0, pending=3))
    assert found.sentence.startswith(
        "61 groups running on 4 workers; 3 of 4 workers idle while gpu1 holds 61 of 64 groups; the trainer has"
    )
    assert found.to_do == [
        "to do: look at the log of an idle worker: does it have the same weights, tasks and release as the others?"
    ]
