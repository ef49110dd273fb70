"""Reads what the roles did and what the store holds, and finds broken promises. Pure; shares no code with rollq.

Each `check_*` returns one sentence per violation. `check` runs all of them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from faults.dump import STATUSES, Dump, TaskDump
from faults.history import OK, UNKNOWN, Event

PENDING_LETTER = "p"
WHOLE = "all"
"""The name of a frame of all samples."""
FINISHED = {"completed", "gathered", "cooling", "claimed", "archived"}
"""Statuses of groups whose generated samples are all stored."""
KEPT = FINISHED | {"filtered", "failed"}
"""Where a group may be that was acknowledged as completed, while it is fresh."""
FENCED_CALLS = ("claim", "release", "publish", "commit", "checkpoint")

GroupKey = tuple[str, int]


class Violation(NamedTuple):
    """A broken invariant, and how it shows."""

    invariant: str
    message: str


class Rules(NamedTuple):
    """What the run promised: `threshold` of staleness in train steps."""

    threshold: int


def check(events: Sequence[Event], dump: Dump, rules: Rules) -> list[Violation]:
    """Every violation that the histories and the final store show."""
    found: list[Violation] = []
    for name, task in dump.tasks.items():
        found += [Violation("I1", f"task {name}: {message}") for message in check_conservation(task)]
        found += [Violation("I1", f"task {name}: {message}") for message in check_cursor(task)]
        found += [Violation("I6", f"task {name}: {message}") for message in check_payloads(task)]
        found += [Violation("I7", f"task {name}: {message}") for message in check_settled(task)]
    checks: Mapping[str, Callable[[Sequence[Event], Dump, Rules], Iterable[str]]] = {
        "I2": check_acknowledged,
        "I3": check_trained_once,
        "lent": check_given_back,
        "I4": check_steps,
        "I5": check_staleness,
        "fence": check_fence,
        "ranks": check_ranks,
        "replay": check_replay,
    }
    for invariant, run_check in checks.items():
        found += [Violation(invariant, message) for message in run_check(events, dump, rules)]
    return found


# -- the store alone ------------------------------------------------------------------------------------------------


def check_conservation(task: TaskDump) -> Iterator[str]:
    """I1: each group is in exactly one status set, its own status agrees, and admitted = present + dropped."""
    filed: dict[int, str] = {}
    for status in STATUSES:
        for group_id in task.sets[status]:
            if group_id in filed:
                yield f"group {group_id} is {filed[group_id]} and {status}"
            filed[group_id] = status
            own = task.groups.get(group_id, {}).get("status")
            if own != status:
                yield f"group {group_id} is filed as {status}, but its own status is {own}"
    for group_id in sorted(task.groups.keys() - filed.keys()):
        yield f"group {group_id} is in no status set"
    admitted = int(task.progress.get("admitted", 0))
    dropped = sum(int(count) for name, count in task.progress.items() if name.startswith("dropped_"))
    if admitted != len(filed) + dropped:
        yield f"{admitted} groups were admitted, but {len(filed)} are filed and {dropped} were dropped"


def check_cursor(task: TaskDump) -> Iterator[str]:
    """I1: each prompt up to the cursor was admitted once; all prompts of the fault suite are usable."""
    cursor, admitted, inserted = (int(task.progress.get(name, 0)) for name in ("cursor", "admitted", "inserted"))
    if cursor != admitted - inserted:
        yield f"the cursor is {cursor}, but {admitted} groups were admitted, {inserted} of them inserted"


def check_payloads(task: TaskDump) -> Iterator[str]:
    """I6: no payload without an index entry, no index entry without a payload, and secondary indexes that agree."""
    for group_id in sorted(task.frames.keys() - task.groups.keys()):
        yield f"group {group_id} has samples, but is gone"
    named = {(group_id, group["payload"]) for group_id, group in task.groups.items() if "payload" in group}
    here = {(group_id, payload) for group_id, payload in named if ":" not in payload}
    for group_id, nonce in sorted(task.payloads ^ here):
        yield f"group {group_id} and payload {nonce}: only one of them is there"
    away = {payload for _, payload in named - here}
    for payload in sorted(away - task.away):
        yield f"payload {payload} is named by a group, and gone"
    for payload in sorted(task.away - away):
        _, owner, leaf = payload.split(":")
        if task.groups.get(int(owner), {}).get("nonce") != leaf.partition("-")[0]:  # it may yet be put
            yield f"payload {payload} is not of any group"
    for group_id, group in task.groups.items():
        letters = group.get("letters", "")
        made = {index for index, letter in enumerate(letters) if letter != PENDING_LETTER}
        names = set(task.frames.get(group_id, ()))
        if "payload" in group:
            if WHOLE in names:
                yield f"group {group_id} has all its samples in a field and in a payload"
            if (group_id, group["payload"]) in task.payloads or group["payload"] in task.away:
                names.add(WHOLE)
        stored = {int(name) for name in names if name != WHOLE}
        frames = {field for field in stored if field < len(letters)}
        parts = {field - len(letters) for field in stored - frames}  # salvaged, of samples that are still being made
        if not parts <= set(range(int(group.get("parts", 0)))):
            yield f"group {group_id} has parts {sorted(parts)}, and counts {group.get('parts', 0)}"
        elif parts and (group.get("status") in FINISHED or not made):
            yield f"group {group_id} is {group.get('status')} with samples {letters!r}, and has parts {sorted(parts)}"
        elif not frames <= made or (WHOLE in names and not made - frames):
            yield f"group {group_id} has samples {sorted(names)}, but its letters are {letters!r}"
        elif group.get("status") in FINISHED and names != {WHOLE}:
            yield f"group {group_id} is {group.get('status')}, but has samples {sorted(names)}, not all in one frame"
    sets = {name: set(members) for name, members in task.sets.items()}
    if sets["by_version"] != sets["completed"] | sets["aborted"]:
        yield f"by_version differs by {sorted(sets['by_version'] ^ (sets['completed'] | sets['aborted']))}"
    if sets["generating"] != sets["running"]:
        yield f"generating differs from running by {sorted(sets['generating'] ^ sets['running'])}"
    if not sets["suspects"] <= sets["pending"]:
        yield f"suspects {sorted(sets['suspects'] - sets['pending'])} are not pending"


def check_settled(task: TaskDump) -> Iterator[str]:
    """I7: once all roles have stopped orderly, nothing is left running."""
    if task.sets["running"]:
        yield f"groups {sorted(task.sets['running'])} are still running"


# -- results ----------------------------------------------------------------------------------------------------------


class Put(NamedTuple):
    """One result that a worker sent: its digest, and those of its samples."""

    event: Event
    digest: str
    oldest: int | None
    outcome: str | None
    attempt: int
    samples: Sequence[str]


def puts_by_group(events: Sequence[Event]) -> dict[GroupKey, list[Put]]:
    """Every result that was sent, by its group, in the order of sending."""
    found: dict[GroupKey, list[Put]] = defaultdict(list)
    for event in _calls(events, "put"):
        outcomes = event.facts.get("outcomes") or [None] * len(event["results"])
        results = zip(event["results"], event["made"], outcomes, strict=True)
        for (task, group_id, digest, oldest), (attempt, samples), outcome in results:
            found[task, group_id].append(Put(event, digest, oldest, outcome, attempt, samples))
    return found


def check_acknowledged(events: Sequence[Event], dump: Dump, rules: Rules) -> Iterator[str]:
    """I2: a group that was acknowledged as completed or inserted is kept, or was trained, or had time to become too
    stale, or an operator has moved it."""
    steps = [int(task.clock["step"]) for task in dump.tasks.values()]
    last_step = max([*steps, *(event["step"] + 1 for event in _calls(events, "claim"))])
    gone = _trained(events, _final_weights(events))
    ordered, inserted, puts_of = _ordered_ns(events), _inserted(events), puts_by_group(events)
    for task, group_id in puts_of.keys() | inserted.keys():
        accepted = [put for put in puts_of.get((task, group_id), ()) if put.outcome == "completed"]
        sure = [put.event for put in accepted] + [found for found, _ in inserted.get((task, group_id), ())]
        sure = [event for event in sure if event.end == OK]
        if not sure or sure[-1].began_ns < ordered.get((task, group_id), 0):
            continue
        group = dump.tasks[task].groups.get(group_id)
        if group is None:
            step = gone.get((task, group_id))
            if step is None or step > int(dump.tasks[task].clock["checkpoint"]):
                yield f"group {group_id} of {task} was acknowledged as completed, and is gone untrained ({step})"
        elif group.get("status") not in KEPT and not (
            accepted and _may_be_stale(accepted[-1], events, last_step, rules)
        ):
            yield f"group {group_id} of {task} was acknowledged as completed and is fresh, but is {group.get('status')}"


def _inserted(events: Sequence[Event]) -> dict[GroupKey, list[tuple[Event, str]]]:
    """The insertions of each group, and its digest. There is one source: its groups arrive in their order."""
    found: dict[GroupKey, list[tuple[Event, str]]] = defaultdict(list)
    for event in _calls(events, "insert"):
        for group_id, digest in enumerate(event["digests"], start=event["after"] + 1):
            found[event["task"], group_id].append((event, digest))
    return found


def _ordered_ns(events: Sequence[Event]) -> dict[GroupKey, int]:
    """When the last order for each group ended that may have moved it."""
    orders = [event for event in _calls(events, "order group") if event.end == UNKNOWN or event.facts.get("done")]
    return {(event["task"], event["group_id"]): event.ended_ns for event in orders}


def _may_be_stale(put: Put, events: Sequence[Event], last_step: int, rules: Rules) -> bool:
    """Whether an accepted result may have expired, or been sampled again after a rewind."""
    later = [event for event in _calls(events, "begin") if event.ended_ns > put.event.began_ns]
    if put.oldest is None or any(event["mode"] == "regenerate" for event in later):
        return True
    oldest = min([put.oldest, *(event["from_step"] for event in later)])
    return bool(last_step - oldest - 1 >= rules.threshold)


def check_given_back(events: Sequence[Event], dump: Dump, rules: Rules) -> Iterator[str]:
    """A sample that a borrower has given back is in the result of its lease: nobody else has made it too."""
    given_back: dict[tuple[str, int, int], dict[int, str]] = defaultdict(dict)
    for event in _calls(events, "give back"):
        outcomes = event.facts.get("outcomes") or [None] * len(event["samples"])
        for (task, group_id, attempt, index, digest), outcome in zip(event["samples"], outcomes, strict=True):
            if outcome == "kept":
                given_back[task, group_id, attempt][index] = digest
    for (task, group_id), puts in puts_by_group(events).items():
        for put in (put for put in puts if put.outcome == "completed"):
            for index, digest in given_back[task, group_id, put.attempt].items():
                if put.samples[index] != digest:
                    yield f"sample {index} of group {group_id} of {task} was lent, given back, and made once more"


def samples_lent(events: Sequence[Event]) -> int:
    """How many samples were lent, as far as borrowers have heard of it."""
    return sum(len(indices) for event in _calls(events, "borrow") for *_, indices in event.facts.get("loans", ()))


# -- training ---------------------------------------------------------------------------------------------------------


def check_trained_once(events: Sequence[Event], dump: Dump, rules: Rules) -> Iterator[str]:
    """I3: no history of weights has trained a group twice, and what was trained is what a worker sent."""
    puts, inserted = puts_by_group(events), _inserted(events)
    for event in _trains(events):
        for task, group_id, digest, _ in event["groups"]:
            sent = {put.digest for put in puts[task, group_id]} | {made for _, made in inserted[task, group_id]}
            if digest not in sent:
                yield f"step {event['step']} trained bytes of group {group_id} of {task} that nobody sent"
    trains = _trains_by_weights(events)
    followed = {event["before"] for event in trains.values()}
    for leaf in trains.keys() - followed:
        seen: dict[GroupKey, int] = {}
        for event in _lineage(trains, leaf):
            for task, group_id, *_ in event["groups"]:
                if (task, group_id) in seen:
                    steps = f"steps {event['step']} and {seen[task, group_id]}"
                    yield f"group {group_id} of {task} was trained at {steps} of one history of weights"
                seen[task, group_id] = event["step"]


def check_steps(events: Sequence[Event], dump: Dump, rules: Rules) -> Iterator[str]:
    """I4: the committed steps of an epoch have no gaps, and its published versions never fall."""
    for epoch, begin in _epochs(events).items():
        commits = [event["step"] for event in _calls(events, "commit") if event["epoch"] == epoch and event.end == OK]
        if commits != list(range(begin["from_step"] + 1, begin["from_step"] + 1 + len(commits))):
            yield f"epoch {epoch}, which began after step {begin['from_step']}, committed the steps {commits}"
        versions = [event["version"] for event in _calls(events, "publish") if event["epoch"] == epoch]
        if any(after < before for before, after in pairwise(versions)):
            yield f"epoch {epoch} published the versions {versions}"
    yield from _check_last_epoch(events, dump)


def _check_last_epoch(events: Sequence[Event], dump: Dump) -> Iterator[str]:
    """The clocks of all tasks have what the last epoch committed for certain, and nothing that it did not try."""
    live = int(dump.trainer.get("epoch", 0))
    commits = [event for event in _calls(events, "commit") if event["epoch"] == live]
    certain = max((event["step"] for event in commits if event.end == OK), default=0)
    tried = max((event["step"] for event in commits), default=None)
    for name, task in dump.tasks.items():
        committed = int(task.clock["committed"])
        if committed < certain or (tried is not None and committed > tried):
            yield f"task {name} has committed step {committed}; epoch {live} has committed {certain} and tried {tried}"


def check_staleness(events: Sequence[Event], dump: Dump, rules: Rules) -> Iterator[str]:
    """I5: no token of a trained batch was past the staleness bound when the batch was claimed."""
    epochs, alike = _epochs(events), _published_alike(events)
    for event in _trains(events):
        claimed_in = _claimed_in(events, event)
        for task, group_id, _, spans in event["groups"]:
            for epoch, version in spans:
                counted = version
                for later in sorted(number for number in epochs if epoch < number <= claimed_in):
                    again = (one for one in alike(epoch, later, event.began_ns) if one <= version)
                    counted = max(min(counted, epochs[later]["from_step"]), *again, -1)
                staleness = event["step"] - counted - 1
                if staleness >= rules.threshold:
                    yield f"step {event['step']} trained a token of group {group_id} of {task} at staleness {staleness}"


def _published_alike(events: Sequence[Event]) -> Callable[[int, int, int], Iterator[int]]:
    """A function of a dead epoch, a later one and a moment: the versions that the later one had published until then
    with the weights that they had in the dead one."""
    made = {(event["epoch"], event["step"]): event["after"] for event in _trains(events)}
    published = _calls(events, "publish")

    def alike(dead: int, later: int, before_ns: int) -> Iterator[int]:
        for event in published:
            weights = made.get((later, event["version"]))
            is_same = weights is not None and weights == made.get((dead, event["version"]))
            if is_same and event["epoch"] == later and event.began_ns < before_ns:
                yield event["version"]

    return alike


def _claimed_in(events: Sequence[Event], train: Event) -> int:
    """The earliest epoch in which the batch may have been claimed: a replayed one is as old as it was then."""
    found = [int(train["epoch"])]
    for event in _calls(events, "claim"):
        if event["step"] == train["step"] and (event.end == UNKNOWN or event.facts.get("digest") == train["digest"]):
            found.append(int(event["epoch"]))
    return min(found)


def check_fence(events: Sequence[Event], dump: Dump, rules: Rules) -> Iterator[str]:
    """Once a trainer has taken over, no call of the one before succeeds."""
    begun = sorted((event for event in _calls(events, "begin") if event.end == OK), key=lambda event: event.ended_ns)
    for event in events:
        if event.what not in FENCED_CALLS or event.end != OK:
            continue
        for begin in begun:
            if begin["epoch"] > event["epoch"] and begin.ended_ns < event.began_ns:
                yield f"{event.role} called {event.what} in epoch {event['epoch']}, after epoch {begin['epoch']} began"
                break


def check_ranks(events: Sequence[Event], dump: Dump, rules: Rules) -> Iterator[str]:
    """All ranks of an epoch get the same batch for a step."""
    digests: dict[tuple[int, int, bool], set[str]] = defaultdict(set)
    for event in _calls(events, "claim"):
        if event.end == OK:
            digests[event["epoch"], event["step"], event["again"]].add(event["digest"])
    for (epoch, step, _), found in digests.items():
        if len(found) > 1:
            yield f"the ranks of epoch {epoch} got {len(found)} different batches for step {step}"


def check_replay(events: Sequence[Event], dump: Dump, rules: Rules) -> Iterator[str]:
    """A restart in mode `replay` gets the batches that its predecessor got and did not release, byte for byte."""
    last: dict[tuple[int, str], str] = {}
    undone = [event for event in _calls(events, "begin") if event["mode"] != "replay"] + _calls(events, "release")
    seen_ns: dict[tuple[int, str], int] = {}
    for event in _calls(events, "claim"):
        if event.end != OK:
            continue
        key = (event["step"], event["weights"])
        since_ns = seen_ns.get(key, event.began_ns)
        replayed = not any(since_ns < other.ended_ns and other.began_ns < event.ended_ns for other in undone)
        if replayed and last.get(key, event["digest"]) != event["digest"]:
            yield f"epoch {event['epoch']} replayed step {event['step']} with other bytes"
        last[key], seen_ns[key] = event["digest"], event.began_ns


# -- reading histories ------------------------------------------------------------------------------------------------


def _calls(events: Sequence[Event], what: str) -> list[Event]:
    return [event for event in events if event.what == what]


def _trains(events: Sequence[Event]) -> list[Event]:
    return _calls(events, "train")


def _epochs(events: Sequence[Event]) -> dict[int, Event]:
    """The start of each epoch that is known to have begun."""
    return {event["epoch"]: event for event in _calls(events, "begin") if event.end == OK}


def _trains_by_weights(events: Sequence[Event]) -> dict[str, Event]:
    """The training of each batch by the weights that it gave."""
    return {event["after"]: event for event in _trains(events)}


def _lineage(trains: Mapping[str, Event], weights: str) -> Iterator[Event]:
    """The trained batches that led to these weights, the last one first."""
    while weights in trains:
        yield trains[weights]
        weights = trains[weights]["before"]


def _final_weights(events: Sequence[Event]) -> str:
    """The weights of the last checkpoint."""
    last = max(_calls(events, "save"), key=lambda event: (event["epoch"], event["step"]), default=None)
    return str(last["weights"]) if last else ""


def _trained(events: Sequence[Event], weights: str) -> dict[GroupKey, int]:
    """The groups in the history of these weights, each with its step."""
    lineage = _lineage(_trains_by_weights(events), weights)
    return {(task, group_id): event["step"] for event in lineage for task, group_id, *_ in event["groups"]}
