"""Recovery times are read from histories correctly."""

import pytest

from faults.history import NOTE, OK, Event
from faults.recovery import percentile, trainer_recoveries_s, worker_recoveries_s

S = 1_000_000_000


def event(what: str, at_s: float, role: str, end: str = OK, **facts: object) -> Event:
    return Event(role, what, end, round(at_s * S), round(at_s * S), facts)


def lease(at_s: float, role: str, *group_ids: int) -> Event:
    return event("lease", at_s, role, groups=[("math", group_id) for group_id in group_ids])


def put(at_s: float, role: str, group_id: int) -> Event:
    return event("put", at_s, role, results=[("math", group_id, "bytes", 0)], outcomes=["completed"])


def test_a_worker_is_recovered_when_another_has_leased_its_groups() -> None:
    kill = event("kill", 2, "orchestrator", NOTE, target="worker0")
    events = [lease(1, "worker0", 1, 2), lease(1, "worker1", 3), put(1.5, "worker0", 1), kill]
    events += [lease(3.25, "worker1", 2), put(4, "worker1", 2), put(4, "worker1", 3)]
    assert worker_recoveries_s(events) == [1.25]


def test_a_trainer_is_recovered_when_it_has_the_batch_that_it_had() -> None:
    events = []
    for epoch, at_s, digest in ((1, 0, "a"), (2, 10, "a"), (3, 20, "b")):
        events.append(event("launch", at_s, "orchestrator", NOTE, launch=f"launch {epoch}"))
        events.append(event("begin", at_s + 0.25, "trainer0", epoch=epoch, launch=f"launch {epoch}"))
        events.append(event("claim", at_s + 0.5, "trainer0", epoch=epoch, digest=digest))
    assert trainer_recoveries_s(events) == [0.5]


def test_percentiles() -> None:
    values = [float(number) for number in range(100)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (50, 99, 99)
    assert percentile([], 99) == pytest.approx(float("nan"), nan_ok=True)
