"""The error that ends a wait says what to do about it."""

import pytest

from rollq.buffer.schema import Status
from rollq.buffer.settings import TaskRules
from rollq.buffer.values import Clock, Control, Counts, Shortfall
from rollq.consumer.waiting import explain_wait


def counts(statuses: dict[Status, int], *, version: int = 4, control: Control = Control.RUN) -> Counts:
    clock = Clock(
        incarnation="i",
        epoch=1,
        step=5,
        version=version,
        committed=4,
        claimed_step=4,
        checkpoint=0,
        history=0,
        control=control,
        rules=TaskRules(batch_groups=8, max_staleness=1),
        floors={},
    )
    return Counts("math", clock, statuses, ready=3, progress={}, server_ms=0)


SHORT = Shortfall(5, ready={"math": 3}, wanted={"math": 8})


@pytest.mark.parametrize(
    ("found", "workers", "reason"),
    [
        (counts({Status.RUNNING: 5}), 2, "2 workers are generating"),
        (counts({Status.PENDING: 5}), 0, "none is alive"),
        (counts({Status.PENDING: 5}), 2, "no worker takes the pending groups$"),
        (counts({Status.COMPLETED: 3}), 2, "is a producer running"),
        (counts({Status.PENDING: 5}, control=Control.PAUSE), 2, "set to pause"),
        (counts({Status.COMPLETED: 9}, version=2), 2, "version 2, are too old for it: publish"),
    ],
)
def test_the_reason_follows_from_the_counts(found: Counts, workers: int, reason: str) -> None:
    with pytest.raises(TimeoutError, match=reason):
        raise TimeoutError(explain_wait(SHORT, [found], workers))


def test_every_task_is_listed_with_its_counts() -> None:
    text = explain_wait(Shortfall(5, {"code": 0}, {"code": 4}), [counts({Status.COMPLETED: 9, Status.FAILED: 1})], 1)
    assert text == "no batch for step 5:\n  task 'math': completed 9, failed 1; it has enough"
