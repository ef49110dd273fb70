"""The checker finds what it is there to find: one broken history for each promise, and none in a sound one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from faults.checker import Rules, check
from faults.dump import STATUSES, Dump, TaskDump
from faults.history import FAIL, NOTE, OK, UNKNOWN, Event

RULES = Rules(threshold=2)
Story = tuple[list[Event], Dump]


def event(what: str, end: str = OK, *, at: int, role: str = "trainer0", **facts: Any) -> Event:
    return Event(role, what, end, at, at + 1, facts)


def trained(group_id: int, spans: list[tuple[int, int]] | None = None) -> tuple[str, int, str, list[tuple[int, int]]]:
    return ("math", group_id, f"bytes {group_id}", spans or [(1, 0)])


def step(number: int, at: int, *group_ids: int, epoch: int = 1, **changes: Any) -> list[Event]:
    """Both ranks claim a step; rank 0 trains, publishes and commits it."""
    digest = changes.get("digest", f"batch {number}")
    shared: dict[str, Any] = {"epoch": epoch, "step": number}
    train = {"before": f"w{number - 1}", "after": f"w{number}", "digest": digest, "groups": [*map(trained, group_ids)]}
    train.update(changes)
    return [
        event("claim", at=at, weights=f"w{number - 1}", again=False, digest=digest, **shared),
        event("claim", at=at, role="trainer1", weights=f"w{number - 1}", again=False, digest=digest, **shared),
        event("train", NOTE, at=at + 2, **shared, **train),
        event("publish", at=at + 4, epoch=epoch, version=number),
        event("commit", at=at + 6, **shared),
    ]


def claim(at: int, *, epoch: int, role: str = "trainer0") -> Event:
    """A claim of step 2 that gets another batch than the first one."""
    return event("claim", at=at, role=role, epoch=epoch, step=2, weights="w1", again=False, digest="another")


def put(at: int, *group_ids: int, outcome: str = "completed", oldest: int = 0) -> Event:
    results = [("math", group_id, f"bytes {group_id}", oldest) for group_id in group_ids]
    made = [(1, [f"sample {index} of {group_id}" for index in range(2)]) for group_id in group_ids]
    return event("put", at=at, role="worker0", results=results, made=made, outcomes=[outcome] * len(group_ids))


def insert(at: int, *group_ids: int) -> Event:
    digests = [f"bytes {group_id}" for group_id in group_ids]
    return event("insert", at=at, role="importer", task="math", after=group_ids[0] - 1, digests=digests)


def order(at: int, group_id: int, *, done: bool = True) -> Event:
    return event("order group", at=at, role="orchestrator", task="math", group_id=group_id, done=done)


def give_back(at: int, group_id: int, index: int, digest: str, outcome: str = "kept") -> Event:
    samples = [("math", group_id, 1, index, digest)]
    return event("give back", at=at, role="worker1", samples=samples, outcomes=[outcome])


def begin(at: int, *, epoch: int = 1, from_step: int = 0, mode: str = "replay") -> Event:
    return event("begin", at=at, epoch=epoch, from_step=from_step, mode=mode, weights=f"w{from_step}")


def task_dump(**changes: Any) -> TaskDump:
    """Groups 1 and 2 are trained and gone, 3 and 4 archived, 5 completed, 6 pending."""
    sets: dict[str, dict[int, float]] = {name: {} for name in (*STATUSES, "by_version", "generating", "suspects")}
    for group_id, status in {3: "archived", 4: "archived", 5: "completed", 6: "pending"}.items():
        sets[status][group_id] = 1.0
    sets["by_version"][5] = 1.0
    letters = {3: "cc", 4: "cc", 5: "cc", 6: "pp"}
    filed = {3: "archived", 4: "archived", 5: "completed", 6: "pending"}
    return TaskDump(
        **{
            "clock": {"step": "3", "committed": "2", "checkpoint": "1"},
            "progress": {"admitted": "6", "cursor": "6", "dropped_trained": "2"},
            "sets": sets,
            "groups": {number: {"status": filed[number], "letters": letters[number]} for number in letters},
            "frames": {number: frozenset({"all"}) for number in (3, 4, 5)},
            "payloads": frozenset(),
            "away": frozenset(),
            "manifests": {},
            **changes,
        }
    )


def sound_story() -> Story:
    """Two steps are trained, the first is checkpointed, and a third batch waits."""
    events = [begin(0), put(10, 1, 2), *step(1, 20, 1, 2), event("save", NOTE, at=30, epoch=1, step=1, weights="w1")]
    events += [put(40, 3, 4), *step(2, 50, 3, 4), put(60, 5)]
    return events, Dump(model={}, trainer={"epoch": "1"}, tasks={"math": task_dump()})


def test_nothing_is_found_in_a_sound_history() -> None:
    assert check(*sound_story(), RULES) == []


def with_task(story: Story, **changes: Any) -> Story:
    events, dump = story
    return events, replace(dump, tasks={"math": replace(dump.tasks["math"], **changes)})


def with_events(story: Story, *events: Event) -> Story:
    return [*story[0], *events], story[1]


def in_two_statuses(story: Story) -> Story:
    sets = dict(story[1].tasks["math"].sets)
    return with_task(story, sets={**sets, "claimed": {5: 3.0}})


def gone_uncounted(story: Story) -> Story:
    task = story[1].tasks["math"]
    return with_task(story, progress={**task.progress, "admitted": "7", "cursor": "7"})


def acknowledged_and_gone(story: Story) -> Story:
    progress = {"admitted": "7", "cursor": "7", "dropped_trained": "3"}
    return with_events(with_task(story, progress=progress), put(70, 7))


def acknowledged_and_pending(story: Story) -> Story:
    return with_events(story, put(70, 6, oldest=2))


def inserted_and_gone(story: Story) -> Story:
    return with_events(story, insert(70, 7))


def inserted_and_pending(story: Story) -> Story:
    return with_events(story, insert(70, 6))


def gone_though_the_order_was_refused(story: Story) -> Story:
    return with_events(acknowledged_and_gone(story), order(80, 7, done=False))


def gone_though_it_was_put_after_the_order(story: Story) -> Story:
    return with_events(acknowledged_and_gone(story), order(65, 7))


def one_inserted_that_the_cursor_counts(story: Story) -> Story:
    task = story[1].tasks["math"]
    return with_task(story, progress={**task.progress, "inserted": "1"})


def filed_without_group(story: Story) -> Story:
    """Group 5 was acknowledged, and only an empty record is left of it."""
    task = story[1].tasks["math"]
    return with_task(story, groups={**task.groups, 5: {}})


def trained_twice(story: Story) -> Story:
    return with_events(story, put(70, 3), *step(3, 80, 3))


def trained_from_nowhere(story: Story) -> Story:
    return with_events(story, *step(3, 80, 8))


def made_by_two_workers(story: Story) -> Story:
    return with_events(story, give_back(55, 5, 1, "another sample"))


def step_left_out(story: Story) -> Story:
    return with_events(story, put(70, 9), *step(4, 80, 9, before="w2"))


def version_that_falls(story: Story) -> Story:
    return with_events(story, event("publish", at=70, epoch=1, version=1))


def commit_that_is_gone(story: Story) -> Story:
    return with_task(story, clock={"step": "3", "committed": "1", "checkpoint": "1"})


def too_stale(story: Story) -> Story:
    groups = [("math", 9, "bytes 9", [(1, 0)])]
    return with_events(story, put(70, 9), *step(3, 80, groups=groups))


def newer_than_its_rewind(story: Story) -> Story:
    """Tokens of version 9 of epoch 1 count as version 0 in an epoch that began at step 0."""
    events, dump = story
    groups = [("math", 9, "bytes 9", [(1, 9)])]
    late = [begin(100, epoch=2), put(110, 9), *step(3, 120, epoch=2, groups=groups)]
    return [*events, *late], replace(dump, trainer={"epoch": "1"})


def replayed(story: Story, after: str, *restarts: Event) -> Story:
    """Step 2 is replayed in another epoch, and then, after `restarts`, a batch is trained whose tokens are of version 2
    of the first."""
    groups = [("math", 9, "bytes 9", [(1, 2)])]
    again = step(2, 110, 3, 4, epoch=2, after=after)
    live = 2 + len(restarts)
    late = [begin(100, epoch=2, from_step=1), *again, put(120, 9), *restarts]
    late += step(4, 130, epoch=live, groups=groups, before=after)
    events, dump = with_events(story, *late)
    return [one for one in events if one.what != "claim" or one["step"] != 4], replace(dump, trainer={"epoch": "1"})


def newer_than_a_replay_before(story: Story) -> Story:
    """Also for the epoch after that."""
    return replayed(story, "other weights", begin(125, epoch=3, from_step=2))


def newer_than_its_replay(story: Story) -> Story:
    """The replay has given other weights: tokens of version 2 of epoch 1 count as version 1."""
    return replayed(story, after="other weights")


def payload_without_group(story: Story) -> Story:
    return with_task(story, frames={**story[1].tasks["math"].frames, 9: frozenset({"all"})})


def payload_away_without_group(story: Story) -> Story:
    return with_task(story, away=frozenset({"store:1:dead-beef"}))


def group_without_payload_away(story: Story) -> Story:
    groups = story[1].tasks["math"].groups
    (group_id, group), *_ = groups.items()
    return with_task(story, groups={**groups, group_id: {**group, "payload": "store:1:dead-beef"}})


def group_without_payload(story: Story) -> Story:
    return with_task(story, frames={3: frozenset({"all"}), 4: frozenset({"all"}), 5: frozenset({"1"})})


def index_behind(story: Story) -> Story:
    return with_task(story, sets={**story[1].tasks["math"].sets, "by_version": {}})


def left_running(story: Story) -> Story:
    task = story[1].tasks["math"]
    sets = {**task.sets, "pending": {}, "running": {6: 1.0}, "generating": {6: 0.0}}
    return with_task(story, sets=sets, groups={**task.groups, 6: {"status": "running", "letters": "pp"}})


def zombie_that_commits(story: Story) -> Story:
    return with_events(story, begin(100, epoch=2, from_step=2), event("commit", at=110, epoch=1, step=3))


def ranks_apart(story: Story) -> Story:
    return with_events(story, claim(70, role="trainer1", epoch=1))


def replay_apart(story: Story) -> Story:
    return with_events(story, begin(100, epoch=2, from_step=1), claim(110, epoch=2))


@pytest.mark.parametrize(
    ("invariant", "breaks"),
    [
        ("I1", in_two_statuses),
        ("I1", gone_uncounted),
        ("I2", acknowledged_and_gone),
        ("I2", acknowledged_and_pending),
        ("I2", inserted_and_gone),
        ("I2", inserted_and_pending),
        ("I2", gone_though_the_order_was_refused),
        ("I2", gone_though_it_was_put_after_the_order),
        ("I1", one_inserted_that_the_cursor_counts),
        ("I1", filed_without_group),
        ("I3", trained_twice),
        ("I3", trained_from_nowhere),
        ("lent", made_by_two_workers),
        ("I4", step_left_out),
        ("I4", version_that_falls),
        ("I4", commit_that_is_gone),
        ("I5", too_stale),
        ("I5", newer_than_its_rewind),
        ("I5", newer_than_its_replay),
        ("I5", newer_than_a_replay_before),
        ("I6", payload_without_group),
        ("I6", payload_away_without_group),
        ("I6", group_without_payload_away),
        ("I6", group_without_payload),
        ("I6", index_behind),
        ("I7", left_running),
        ("fence", zombie_that_commits),
        ("ranks", ranks_apart),
        ("replay", replay_apart),
    ],
)
def test_each_broken_promise_is_found(invariant: str, breaks: Callable[[Story], Story]) -> None:
    found = check(*breaks(sound_story()), RULES)
    assert invariant in {violation.invariant for violation in found}, found


def test_groups_that_were_inserted_or_moved_by_an_order_are_no_violations() -> None:
    events, dump = with_events(sound_story(), insert(5, 3), put(70, 6, oldest=2), order(80, 6))
    sound = [one for one in events if one.what != "put" or one["results"][0][1] != 3]
    assert check([*sound, put(41, 4)], dump, RULES) == []


def test_samples_that_were_given_back_or_refused_are_no_violations() -> None:
    back, late = give_back(55, 5, 1, "sample 1 of 5"), give_back(58, 5, 0, "another sample", "refused")
    assert check(*with_events(sound_story(), back, late), RULES) == []


def test_a_refused_call_of_a_zombie_and_a_lost_reply_are_no_violations() -> None:
    story = with_events(
        sound_story(),
        begin(100, epoch=2, from_step=2),
        event("commit", FAIL, at=110, epoch=1, step=3),
        event("claim", UNKNOWN, at=120, epoch=2, step=3, weights="w2", again=False),
    )
    assert check(*story, RULES) == []


def test_tokens_are_as_young_as_their_weights_once_a_replay_has_published_these_again() -> None:
    resumed, rewound = (begin(125, epoch=3, from_step=step) for step in (2, 1))
    for restarts, is_young in (([], True), ([resumed], True), ([rewound], False)):
        found = check(*replayed(sound_story(), "w2", *restarts), RULES)
        assert ("I5" not in {violation.invariant for violation in found}) == is_young, found
