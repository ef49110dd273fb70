"""How long it takes until the work of a dead process is in other hands again. Pure: it reads histories."""

from collections.abc import Sequence

from faults.history import OK, Event

NS_PER_S = 1e9


def worker_recoveries_s(events: Sequence[Event]) -> list[float]:
    """For each group that a killed worker held: seconds from the kill until a worker leased it again."""
    leases = [
        (event.ended_ns, event.role, (task, group_id))
        for event in events
        if event.what == "lease" and event.end == OK
        for task, group_id in event["groups"]
    ]
    done = {(task, group_id): event.ended_ns for event in events for task, group_id in _filed(event)}
    found = []
    for kill in (event for event in events if event.what == "kill" and event["target"].startswith("worker")):
        holders = {group: role for at_ns, role, group in leases if at_ns < kill.began_ns}
        held = {group for group, role in holders.items() if role == kill["target"]}
        for group in held:
            again = [at_ns for at_ns, _, other in leases if other == group and at_ns > kill.began_ns]
            if again and done.get(group, 0) > kill.began_ns:
                found.append((min(again) - kill.began_ns) / NS_PER_S)
    return sorted(found)


def _filed(event: Event) -> list[tuple[str, int]]:
    if event.what != "put" or event.end != OK:
        return []
    return [(task, group_id) for task, group_id, *_ in event["results"]]


def trainer_recoveries_s(events: Sequence[Event]) -> list[float]:
    """For each launch that got a batch which an earlier one had: seconds from its start until it had the batch."""
    starts = {event["launch"]: event.began_ns for event in events if event.what == "launch"}
    epochs = {event["epoch"]: event["launch"] for event in events if event.what == "begin" and event.end == OK}
    known: set[str] = set()
    measured: set[int] = set()
    found = []
    for event in (event for event in events if event.what == "claim" and event.end == OK and event.role == "trainer0"):
        if event["epoch"] not in measured and event["digest"] in known and event["epoch"] in epochs:
            found.append((event.ended_ns - starts[epochs[event["epoch"]]]) / NS_PER_S)
        measured.add(event["epoch"])
        known.add(event["digest"])
    return sorted(found)


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed; nan without values."""
    if not sorted_values:
        return float("nan")
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * percent / 100))]
