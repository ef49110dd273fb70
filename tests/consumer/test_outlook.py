"""The outlook of a step whose batch is short, and its explanation."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rollq.buffer.calls.replies.claims import Shortfall
from rollq.buffer.calls.replies.tasks import Clock, Control, Counts, LastError
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.values.memory_use import Fullness
from rollq.buffer.values.rollouts import Status
from rollq.consumer.claims.outlook import Outlook, explain_wait, outlook


def counts(
    statuses: dict[Status, int] | None = None,
    *,
    task: str = "math",
    version: int = 4,
    control: Control = Control.RUN,
    reason: str = "",
    interval: int = 1,
) -> Counts:
    """A task with max_staleness 1: with weights of version 4, steps up to 6 can be trained."""
    clock = Clock(
        incarnation="i",
        epoch=1,
        step=5,
        version=version,
        committed=4,
        claimed_step=4,
        checkpoint=0,
        history=0,
        first_manifest=0,
        undone=0,
        control=control,
        control_reason=reason,
        rules=TaskRules(batch_groups=8, max_staleness=1, sync_weights_interval=interval),
        rules_revision=1,
        floors=Floors(),
    )
    return Counts(task, clock, statuses or {}, ready=3, outcomes=0, kept=0, progress={}, server_ms=0)


SHORT = Shortfall(5, ready={"math": 3}, wanted={"math": 8})
LATE = Shortfall(5, ready={"math": 8}, wanted={"math": 8}, stragglers={"math": 2})
MORE = Shortfall(5, ready={"math": 9}, wanted={"math": 8}, stragglers={"math": 2})
UNARCHIVED = Shortfall(5, ready={"math": 3}, wanted={"math": 8}, unarchived={"math": 6})
ONLY_UNARCHIVED = Shortfall(5, ready={"math": 8}, wanted={"math": 8}, unarchived={"math": 6})
RUNNING, PENDING = {Status.RUNNING: 1}, {Status.PENDING: 1}


@pytest.mark.parametrize(
    ("shortfall", "found", "memory", "expected"),
    [
        pytest.param(SHORT, [counts()], 0.0, Outlook.WAIT, id="nothing under way, but a producer may come"),
        pytest.param(SHORT, [counts(version=3)], 0.0, Outlook.WAIT, id="young enough by one"),
        pytest.param(SHORT, [counts(version=2)], 0.0, Outlook.SYNC_FIRST, id="too old"),
        pytest.param(SHORT, [counts(version=0)], 0.0, Outlook.SYNC_FIRST, id="much too old"),
        pytest.param(SHORT, [counts(RUNNING, version=2)], 0.0, Outlook.SYNC_FIRST, id="what runs cannot help"),
        pytest.param(SHORT, [counts(version=1, interval=2)], 0.0, Outlook.WAIT, id="the interval counts"),
        pytest.param(SHORT, [counts(version=0, interval=2)], 0.0, Outlook.SYNC_FIRST, id="the interval is over"),
        pytest.param(SHORT, [counts(PENDING, control=Control.STOPPED)], 0.0, Outlook.STOPPED, id="pending ones stay"),
        pytest.param(SHORT, [counts(RUNNING, control=Control.STOPPED)], 0.0, Outlook.WAIT, id="stopped, one runs"),
        pytest.param(SHORT, [counts(control=Control.DONE)], 0.0, Outlook.DONE, id="done"),
        pytest.param(SHORT, [counts(PENDING, control=Control.DONE)], 0.0, Outlook.WAIT, id="done, one is pending"),
        pytest.param(SHORT, [counts(RUNNING, control=Control.DONE)], 0.0, Outlook.WAIT, id="done, one runs"),
        pytest.param(SHORT, [counts(control=Control.PAUSE)], 0.0, Outlook.WAIT, id="somebody will resume it"),
        pytest.param(LATE, [counts(control=Control.STOPPED)], 0.0, Outlook.WAIT, id="only stragglers are missing"),
        pytest.param(SHORT, [counts(task="code", version=0)], 0.9, Outlook.WAIT, id="a task that is not short"),
        pytest.param(MORE, [counts(control=Control.STOPPED)], 0.0, Outlook.WAIT, id="more than enough, but stragglers"),
        pytest.param(SHORT, [counts()], 0.95, Outlook.STALLED, id="a server that is fuller still"),
        pytest.param(SHORT, [counts()], 0.8, Outlook.STALLED, id="a full server, and nothing under way"),
        pytest.param(SHORT, [counts()], 0.79, Outlook.WAIT, id="a server that is nearly full"),
        pytest.param(SHORT, [counts(PENDING)], 0.9, Outlook.WAIT, id="a full server, one is pending"),
        pytest.param(SHORT, [counts(RUNNING)], 0.9, Outlook.WAIT, id="a full server, one runs"),
        pytest.param(UNARCHIVED, [counts()], 0.9, Outlook.WAIT, id="a full server, of which the archive takes some"),
        pytest.param(SHORT, [counts(control=Control.DONE)], 0.9, Outlook.DONE, id="done before all"),
        pytest.param(
            Shortfall(5, ready={"code": 0, "math": 3}, wanted={"code": 1, "math": 8}),
            [counts(RUNNING, task="code"), counts(control=Control.STOPPED)],
            0.0,
            Outlook.STOPPED,
            id="one of two is stopped",
        ),
    ],
)
def test_xm03_the_outlook_of_a_step_that_is_short(
    shortfall: Shortfall, found: Sequence[Counts], memory: float, expected: Outlook
) -> None:
    assert outlook(shortfall, found, Fullness(memory)) is expected


@pytest.mark.parametrize(
    ("shortfall", "found", "workers", "reason"),
    [
        (SHORT, counts({Status.RUNNING: 5}), 2, "3 of 8 ready: 2 workers are generating"),
        (SHORT, counts({Status.PENDING: 5}), 0, "no worker takes the pending groups, none is alive (`rollq work`)"),
        (SHORT, counts({Status.PENDING: 5}), 2, "no worker takes the pending groups"),
        (SHORT, counts({Status.PENDING: 5, Status.RUNNING: 1}), 1, "1 worker is generating"),
        (
            SHORT,
            counts({Status.COMPLETED: 3}),
            2,
            "nothing is scheduled: is a producer running (`rollq produce`), and does its prompt file contain prompts?",
        ),
        (
            SHORT,
            counts({Status.PENDING: 5}, control=Control.PAUSE),
            2,
            "production is set to pause: `rollq resume` continues it",
        ),
        (
            SHORT,
            counts({Status.PENDING: 5}, control=Control.STOPPED, reason="too little is kept"),
            2,
            "production is set to stopped: too little is kept; fix the cause, then let production continue "
            "(`rollq resume`)",
        ),
        (
            SHORT,
            counts({Status.COMPLETED: 9}, version=2),
            2,
            "the live weights, version 2, are too old for it: publish newer ones",
        ),
        (SHORT, counts(version=0), 2, "the live weights, version 0, are too old for it: publish newer ones"),
        (SHORT, counts({Status.RUNNING: 5}, version=4), 2, "2 workers are generating"),
        (SHORT, counts({Status.RUNNING: 5}, version=3), 2, "2 workers are generating"),
        (
            UNARCHIVED,
            counts({Status.LEAVING: 6}),
            2,
            "waits for the archive: 6 groups; start `rollq archive`, or raise max_uncheckpointed_steps",
        ),
        (
            ONLY_UNARCHIVED,
            counts({Status.LEAVING: 6}, control=Control.DONE, reason="enough"),
            2,
            "waits for the archive: 6 groups; start `rollq archive`, or raise max_uncheckpointed_steps",
        ),
        (
            LATE,
            counts({Status.RUNNING: 2}),
            2,
            "waiting for 2 running groups that would be too old at the next step",
        ),
    ],
)
def test_the_reason_follows_from_the_counts(shortfall: Shortfall, found: Counts, workers: int, reason: str) -> None:
    text = explain_wait(shortfall, [found], {f"w{number}": {} for number in range(workers)}, Fullness())
    assert text.startswith("no batch for step 5:\n  task 'math': ")
    assert text.rpartition("ready: ")[2] == reason.rpartition("ready: ")[2]


def test_every_task_is_listed_with_its_counts() -> None:
    found = counts({Status.COMPLETED: 9, Status.FAILED: 1})
    text = explain_wait(Shortfall(5, {"code": 0}, {"code": 4}), [found], {"w0": {}}, Fullness())
    assert text == "no batch for step 5:\n  task 'math': completed 9, failed 1; it has enough"
    assert "task 'math': nothing scheduled; 3 of 8 ready" in explain_wait(SHORT, [counts()], {"w0": {}}, Fullness())


def test_workers_that_refuse_weights_say_why() -> None:
    why = "weights of version 4 refused: too large"
    workers: dict[str, dict[str, str | None]] = {"w0": {"refused_weights": None}, "w1": {"refused_weights": why}}
    text = explain_wait(SHORT, [counts({Status.PENDING: 2})], workers, Fullness())
    assert text.splitlines()[2:] == [f"  w1: {why}"]


@pytest.mark.parametrize(("fraction", "named"), [(0.79, False), (0.8, True), (0.95, True)])
def test_a_full_server_is_named_as_the_reason(fraction: float, named: bool) -> None:
    text = explain_wait(SHORT, [counts()], {"w0": {}}, Fullness(fraction))
    assert (f"the server's memory is full to {fraction:.0%} of maxmemory" in text) is named
    assert ("is a producer running" in text) is not named


def test_a_wait_quotes_the_last_error() -> None:
    error = LastError("ValueError: no \\boxed in the answer", age_s=3.4)
    waiting = replace(counts({Status.RUNNING: 5}), last_error=error)
    text = explain_wait(SHORT, [waiting], {"w0": {}}, Fullness())
    assert text.endswith("1 worker is generating; the last error: ValueError: no \\boxed in the answer (3 s ago)")
    failing = replace(waiting, progress={"failed_in_a_row": 17})
    text = explain_wait(SHORT, [failing], {"w0": {}}, Fullness())
    assert "1 worker is generating; the last 17 groups failed; the last error: ValueError" in text
    stopped = replace(counts(control=Control.STOPPED, reason="all fail: ValueError"), last_error=error)
    assert explain_wait(SHORT, [stopped], {}, Fullness()).endswith(
        "set to stopped: all fail: ValueError; fix the cause, then let production continue (`rollq resume`)"
    )
