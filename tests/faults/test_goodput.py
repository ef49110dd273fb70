"""Goodput is counted correctly from histories."""

from collections import Counter

from faults.goodput import FIRST_FAULT_S, WORKERS, make_goodput_plan, trained_tokens
from faults.history import NOTE, OK, UNKNOWN, Event

S = 1_000_000_000


def event(what: str, at_s: float, step: int, end: str = OK, **facts: object) -> Event:
    return Event("trainer0", what, end, at_s * S, at_s * S, {"step": step, **facts})  # type: ignore[arg-type]


def test_a_step_that_is_trained_again_counts_once() -> None:
    events = [event("train", 1, 1, NOTE, tokens=10), event("commit", 2, 1), event("train", 3, 2, NOTE, tokens=20)]
    events += [event("commit", 4, 2, UNKNOWN), event("train", 5, 1, NOTE, tokens=10), event("commit", 6, 1)]
    events += [event("train", 7, 2, NOTE, tokens=20), event("commit", 8, 2)]
    assert trained_tokens(events) == [(2.0, 10), (8.0, 20)]


def test_a_tenth_of_the_workers_is_killed_in_every_step() -> None:
    plan = make_goodput_plan(10.0, FIRST_FAULT_S + 240)
    killed = Counter(fault.target.rstrip("0123456789") for fault in plan)
    assert killed == {"worker": 24 * WORKERS // 10, "trainer": 3, "server": 2}
    assert {fault.kind for fault in plan} == {"kill"}
