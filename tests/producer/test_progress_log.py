import logging

import pytest

from rollq.producer.progress_log import REPORT_S, Move, ProgressLog
from rollq.producer.strategy import SchedulePlan

BUSY = SchedulePlan(target=8, outstanding=4, last_step=2, pools=())
STUCK = SchedulePlan(target=8, outstanding=8, last_step=2, pools=(), reason="no trainer has started yet")


def test_moves_are_summed_up_and_the_reason_of_a_standstill_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    progress = ProgressLog()
    for look in range(10):
        progress.note("math", BUSY, {Move.ADMITTED: 2, Move.EXPIRED: 0})
        progress.report(look * REPORT_S / 5)
    for look in range(10, 40):
        progress.note("math", STUCK, {Move.ADMITTED: 0})
        progress.report(look * REPORT_S / 5)
    assert caplog.messages == [
        "task math: 2 new prompts; 4 of 8 groups scheduled",
        "task math: 10 new prompts; 4 of 8 groups scheduled",
        "task math: 8 new prompts; 8 of 8 groups scheduled",
        "task math: nothing to schedule: no trainer has started yet",
    ]


def test_groups_of_dead_workers_are_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    ProgressLog().note("math", BUSY, {Move.REQUEUED: 3, Move.QUARANTINED: 1})
    assert caplog.messages == ["task math: 3 groups taken from dead workers", "task math: 1 groups quarantined"]
