"""Counts, order, ages and costs of the buffer: what its users rely on, line by line."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.calls.sweeping import SWEEP_IDS_PER_CALL
from rollq.buffer.errors import ConfigError, FencedError
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.rules.staleness import counted_version, stale_threshold, staleness, token_mask
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.values.rollouts import (
    EMPTY_SAMPLE,
    GroupResult,
    Prompt,
    Sample,
    SampleStatus,
    Segment,
    Status,
    VersionSpan,
)
from support.any_server import AnyServer
from support.buffer_run import World, make_sample
from support.waiting import PATIENCE_S


@pytest.fixture
def world(any_server: AnyServer, run_name: str) -> Iterator[World]:
    with Buffer.connect(any_server.url, run_name) as buffer:
        world = World(buffer)
        yield world
        world.check()


def is_stale(step: int, versions: list[int], threshold: int) -> bool:
    return staleness(step, versions) >= threshold


# -- counts and taking ----------------------------------------------------------------------------------------------


def test_xb01_xb14_counts_are_of_one_task_and_status_zeros_included(world: World) -> None:
    world.start(math={}, code={})
    world.complete(3, "math")
    world.admit(2, "math")
    world.complete(1, "code")
    expected = dict.fromkeys(Status, 0)
    assert world.buffer.counts("math").statuses == {**expected, Status.COMPLETED: 3, Status.PENDING: 2}
    assert world.buffer.counts("code").statuses == {**expected, Status.COMPLETED: 1}


def test_xb03_taking_removes_exactly_what_it_returns(world: World) -> None:
    world.start().complete(5)
    taken = [group.group_id for group in world.claim(1).groups]
    assert len(taken) == 2
    where = {group_id: world.buffer.inspect("math", group_id)["status"] for group_id in range(1, 6)}
    assert where == {group_id: "claimed" if group_id in taken else "completed" for group_id in range(1, 6)}


def test_xb03_asking_for_nothing_gives_nothing_and_putting_nothing_does_nothing(world: World) -> None:
    world.start().complete(2)
    assert world.claim(1, math=0).groups == ()
    assert world.buffer.put([]) == []
    assert world.statuses() == {"completed": 2}


def test_xb13_a_task_that_is_short_gives_what_it_has_unless_all_must_be_ready(world: World) -> None:
    world.start(math={}, code={})
    world.complete(3, "math")
    world.complete(1, "code")
    assert not isinstance(world.buffer.claim(world.held, 1, {"math": 2, "code": 2}), Claimed)
    claimed = world.buffer.claim(world.held, 1, {"math": 2, "code": 2}, short_ok=True)
    assert isinstance(claimed, Claimed)
    assert [group.task for group in claimed.groups] == ["math", "math", "code"]
    assert world.buffer.claim(world.held, 1, {"math": 2, "code": 2}) == claimed, "what was given stays given"


def test_xs03_samples_are_numbered_within_their_group(world: World) -> None:
    """XTuner numbers samples over all groups (id x k + j); here a sample is named by its group and its place in it."""
    world.start(math={"group_size": 3})
    world.admit(1)
    (lease,) = world.lease(1)
    assert len(lease.samples) == 3
    world.buffer.put([GroupResult(lease, tuple(make_sample(0, reward=float(place)) for place in range(3)))])
    (group,) = world.buffer.fetch(world.claim(1, math=1).groups)
    assert [sample.reward for sample in group.samples] == [0.0, 1.0, 2.0]


# -- versions and staleness -----------------------------------------------------------------------------------------


def spans(*found: tuple[int, int]) -> Sample:
    """A sample of (version, tokens) spans."""
    tokens = sum(n for _, n in found)
    segment = Segment(
        prompt_ids=np.array([1], np.int32),
        response_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, np.float32),
        versions=tuple(VersionSpan(1, version, n) for version, n in found),
    )
    return Sample(segments=(segment,), status=SampleStatus.COMPLETED, reward=1.0)


def test_xb04_tokens_keep_the_versions_that_the_engine_gave_them(world: World) -> None:
    """XTuner stamps at put with the step's version; here the engine's spans win, also across a swap in mid-answer."""
    world.start(math={"max_staleness": 9, "group_size": 1})
    world.admit(2)
    leases = world.lease(2)
    world.buffer.publish(world.held, 3, uri="u", digest="d")
    world.buffer.put([GroupResult(lease, (spans((0, 2), (3, 1)),)) for lease in leases])
    group = world.buffer.fetch(world.claim(1, math=1).groups)[0]
    assert group.samples[0].segments[0].versions == (VersionSpan(1, 0, 2), VersionSpan(1, 3, 1))
    assert staleness(5, [3, 3]) == 1


@pytest.mark.parametrize(
    ("step", "versions", "age"),
    [(5, [3, 3], 1), (5, [1, 3, 3], 3), (5, [], 0), (1, [0], 0), (3, [4], -2)],
)
def test_xb05_staleness_is_of_the_oldest_token_and_nothing_without_tokens(
    step: int, versions: list[int], age: int
) -> None:
    assert staleness(step, versions) == age


def test_xb05_a_groups_age_is_that_of_its_oldest_sample(world: World) -> None:
    world.start(math={"max_staleness": 9})
    world.admit(2)
    results = [GroupResult(lease, (spans((1, 1), (3, 2)), spans((2, 1)))) for lease in world.lease(2)]
    world.buffer.put(results)
    assert {group.oldest_version for group in world.claim(5).groups} == {1}


@pytest.mark.parametrize(
    ("syncs", "interval", "valid_at", "expired_at"), [(0, 4, 8, 9), (1, 4, 12, 13), (0, 1, 5, 6), (1, 1, 6, 7)]
)
def test_xb06_a_sample_of_version_4_expires_when_its_staleness_reaches_the_threshold(
    syncs: int, interval: int, valid_at: int, expired_at: int
) -> None:
    threshold = stale_threshold(syncs, interval)
    assert not is_stale(valid_at, [4], threshold)
    assert is_stale(expired_at, [4], threshold)


@pytest.mark.parametrize(
    ("syncs", "interval", "message"),
    [(-1, 1, "max_staleness = -1"), (0, 0, "sync_weights_interval = 0"), (0, -2, "sync_weights_interval = -2")],
)
def test_xb06_a_negative_bound_or_no_interval_is_refused(syncs: int, interval: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stale_threshold(syncs, interval)


@pytest.mark.parametrize(
    ("threshold", "mask"), [(4, [False, True]), (8, [True, True]), (1, [False, True]), (5, [True, True])]
)
def test_xb17_which_tokens_are_young_enough(threshold: int, mask: list[bool]) -> None:
    assert token_mask(5, np.array([0, 4]), threshold).tolist() == mask


@pytest.mark.parametrize(
    ("oldest", "newest", "token_threshold", "counted"),
    [(0, 4, 8, 0), (0, 4, 4, 0), (0, 2, 4, -2), (4, 4, 4, 0), (3, 3, 7, 2)],
)
def test_xb17_one_version_tells_both_when_a_token_is_too_old_and_when_all_are_masked(
    oldest: int, newest: int, token_threshold: int, counted: int
) -> None:
    assert counted_version(oldest, newest, 8, token_threshold) == counted
    for step in range(1, 20):
        by_rule = is_stale(step, [oldest], 8) or is_stale(step, [newest], token_threshold)
        assert is_stale(step, [counted], 8) == by_rule


def test_xb17_a_sample_whose_tokens_would_all_be_masked_expires(world: World) -> None:
    world.start(math={"max_staleness": 3, "max_token_staleness": 1, "group_size": 1})
    world.admit(2)
    fresh, masked = world.lease(2)
    world.buffer.put([GroupResult(fresh, (spans((0, 1), (2, 1)),)), GroupResult(masked, (spans((0, 2)),))])
    world.buffer.publish(world.held, 2, uri="u", digest="d")
    assert world.buffer.readiness("math", 2)[0] == 2
    assert world.buffer.readiness("math", 3)[0] == 1
    assert world.buffer.expire("math") == 1
    assert world.statuses() == {"completed": 1, "expired": 1}
    assert world.buffer.readiness("math", 4)[0] == 1
    assert world.buffer.readiness("math", 5)[0] == 0


@pytest.mark.parametrize("late", [True, False], ids=["at the put", "in a sweep"])
@pytest.mark.parametrize("trigger", [0, -1], ids=["sampled again", "dropped"])
def test_xb17_of_a_group_only_the_sample_whose_tokens_are_too_old_is_reset(
    world: World, late: bool, trigger: int
) -> None:
    rules: dict[str, object] = {"max_staleness": 3, "max_token_staleness": 1, "tail_batch_trigger_size": trigger}
    world.start(math=rules).admit(1)
    (lease,) = world.lease(1)
    fresh = spans((0, 1), (2, 1))
    result = GroupResult(lease, (fresh, spans((0, 2))))
    if not late:
        assert world.buffer.put([result]) == [PutOutcome.COMPLETED]
    world.buffer.publish(world.held, 2, uri="u", digest="d")
    if late:
        assert world.buffer.put([result]) == [PutOutcome.DROPPED if trigger else PutOutcome.EXPIRED]
    else:
        assert world.buffer.expire("math") == 1
    assert world.statuses() == ({} if trigger else {"expired": 1})
    assert world.buffer.counts("math").progress["expired"] == 1
    if not trigger:
        world.buffer.recycle("math", epoch=1, target=9, limit=9)
        kept, reset = world.lease(1)[0].samples
        assert kept.segments[0].versions == fresh.segments[0].versions
        assert (kept.reward, reset) == (1.0, EMPTY_SAMPLE)


def test_xb17_a_sample_of_which_age_and_mask_leave_nothing_expires_and_labels_exempt_it(world: World) -> None:
    world.start(math={"max_staleness": 7, "max_token_staleness": 3, "group_size": 1}).admit(3)
    world.buffer.publish(world.held, 4, uri="u", digest="d")
    sample = spans((0, 1), (4, 1))
    (segment,) = sample.segments
    first_only = replace(segment, loss_mask=np.array([True, False]))
    labelled = replace(first_only, arrays={"labels": np.array([0, 1])})
    samples = [sample, *(replace(sample, segments=(one,)) for one in (first_only, labelled))]
    results = [GroupResult(lease, (one,)) for lease, one in zip(world.lease(3), samples, strict=True)]
    assert world.buffer.put(results) == [PutOutcome.COMPLETED, PutOutcome.EXPIRED, PutOutcome.COMPLETED]


@pytest.mark.parametrize(("syncs", "token_syncs", "threshold"), [(1, None, 8), (1, 0, 4), (1, 1, 8), (0, None, 4)])
def test_xb17_tokens_without_a_bound_have_that_of_their_group(
    syncs: int, token_syncs: int | None, threshold: int
) -> None:
    rules = TaskRules(batch_groups=1, sync_weights_interval=4, max_staleness=syncs, max_token_staleness=token_syncs)
    assert rules.token_threshold == threshold


def test_xb11_a_sweep_keeps_ids_and_arrival_tells_how_many_and_touches_only_what_is_stale(world: World) -> None:
    """XTuner refreshes by writing every row again; here ages follow from the step, and a sweep moves what is stale."""
    world.start(math={"max_staleness": 1, "order": "arrival"}).complete(2)
    for step in (1, 2):
        world.buffer.publish(world.held, step, uri="u", digest=f"d{step}")
        if step == 1:
            world.complete(3)
    arrivals = {i: world.buffer.inspect("math", i)["arrival"] for i in range(1, 6)}
    assert world.buffer.expire("math") == 2
    assert {i: world.buffer.inspect("math", i)["arrival"] for i in range(1, 6)} == arrivals
    assert world.statuses() == {"completed": 3, "expired": 2}
    assert [group.group_id for group in world.claim(3).groups] == [3, 4]


def test_xb11_of_two_tasks_a_sweep_drops_the_groups_of_one_and_keeps_those_of_the_other(world: World) -> None:
    world.start(math={"max_staleness": 0, "tail_batch_trigger_size": -1}, code={"max_staleness": 0})
    for task in ("math", "code"):
        world.complete(2, task)
    world.buffer.publish(world.held, 1, uri="u", digest="d1")
    assert [world.buffer.expire(task) for task in ("math", "code")] == [2, 2]
    assert [world.statuses(task) for task in ("math", "code")] == [{}, {"expired": 2}]
    counts = [world.buffer.counts(task) for task in ("math", "code")]
    assert [task.progress["expired"] for task in counts] == [2, 2]
    assert [task.dropped for task in counts] == [{"expired": 2}, {}]


def test_xb11_a_sweep_of_some_statuses_leaves_the_others_as_they_are(world: World) -> None:
    world.start(math={"max_staleness": 0, "group_size": 1, "partial_rollout": True})
    count = 2 * SWEEP_IDS_PER_CALL + 3
    world.admit(2 * count)
    leases = world.lease(2 * count)
    for index, lease in enumerate(leases):
        status = "a" if index % 2 else "c"
        world.buffer.put([GroupResult(lease, (make_sample(0, status=status),))])
    world.buffer.publish(world.held, 1, uri="u", digest="d1")
    assert world.buffer.expire("math", [Status.ABORTED]) == count
    assert world.statuses() == {"completed": count, "expired": count}
    assert world.buffer.expire("math", []) == 0
    assert world.buffer.expire("math", [Status.COMPLETED]) == count
    assert world.statuses() == {"expired": 2 * count}
    with pytest.raises(ConfigError, match="groups that are pending do not expire"):
        world.buffer.expire("math", [Status.PENDING])


def test_xm02_versions_advance_with_the_sync_interval(world: World) -> None:
    world.start(math={"sync_weights_interval": 2, "max_staleness": 0})
    live = []
    for step in (1, 2, 3, 4):
        live.append(world.buffer.clock("math").version)
        world.complete(2)
        world.claim(step)
        if step % 2 == 0:
            world.buffer.publish(world.held, step, uri="u", digest=f"d{step}")
        world.buffer.commit(world.held, step)
    assert live == [0, 0, 2, 2]


# -- better than the models -----------------------------------------------------------------------------------------


def commands_of(buffer: Buffer, action: Callable[[], Any]) -> dict[str, int]:
    """How often each command ran inside and outside functions during `action`."""
    buffer.client.config_resetstat()
    action()
    found: Any = buffer.client.info("commandstats")
    return {name.removeprefix("cmdstat_"): stats["calls"] for name, stats in found.items()}


def test_sb02_the_commands_of_take_count_readiness_and_expiry_do_not_grow_with_the_buffer(
    fresh_server: EmbeddedServer,
) -> None:
    def costs(groups: int) -> list[dict[str, int]]:
        with Buffer.connect(fresh_server.url, f"run-{groups}") as buffer:
            world = World(buffer).start(math={"max_staleness": 1})
            world.complete(groups)
            counted = commands_of(buffer, lambda: buffer.counts("math"))
            ready = commands_of(buffer, lambda: buffer.readiness("math", 1))
            claimed = commands_of(buffer, lambda: world.claim(1))
            swept = commands_of(buffer, lambda: buffer.expire("math"))
            return [counted, ready, claimed, swept]

    small, large = costs(4), costs(400)
    assert small == large
    assert not any({"keys", "scan", "zscan", "smembers"} & set(cost) for cost in large[:2])


def test_sb03_whoever_waits_is_woken_by_every_move_that_may_concern_it(world: World) -> None:
    world.start()
    buffer = world.buffer
    moves: list[Callable[[], Any]] = [
        lambda: world.admit(2),
        lambda: world.put(world.lease(2)),
        lambda: world.claim(1),
        lambda: buffer.publish(world.held, 1, uri="u", digest="d"),
        lambda: buffer.commit(world.held, 1),
        lambda: buffer.set_control("math", buffer.clock("math").control),
        lambda: buffer.sleep(world.held, "step 2 is being trained"),
        lambda: buffer.sleep(world.held, ""),
        lambda: buffer.open_batch("math", "b", "train", step=2),
    ]
    with buffer.events() as events:
        for move in moves:
            events.wait(0.0)
            move()
            assert events.wait(PATIENCE_S), "a lost wake-up would cost a poll, but none is lost here"


def test_sb08_every_group_that_left_without_training_is_counted_under_its_reason(world: World) -> None:
    world.start(math={"tail_batch_trigger_size": -1, "max_staleness": 0, "audit_groups": 0}, code={})
    world.complete(2, "math")
    world.claim(1)
    world.buffer.release(world.held, 1, "drop", claim_round=0)
    world.admit(3, "math")
    filtered, failed, late = world.lease(3, "math")
    world.buffer.put([GroupResult(filtered, (make_sample(0),) * 2, filtered=True)])
    world.put([failed], status="f")
    world.buffer.publish(world.held, 1, uri="u", digest="d")
    assert world.put([late], version=0) == [PutOutcome.DROPPED]
    counts = world.buffer.counts("math")
    assert counts.dropped == {"released": 2, "filtered": 1, "failed": 1, "expired": 1}
    assert counts.unaccounted == 0
    assert world.buffer.counts("code").dropped == {}


def test_sb08_trained_groups_can_be_audited_until_a_checkpoint_covers_them(world: World) -> None:
    world.start().complete(2)
    claimed = world.train(1)
    for group in claimed.groups:
        found = world.buffer.inspect("math", group.group_id)
        assert (found["status"], found["oldest"]) == ("archived", "0")
    assert len(world.buffer.fetch(claimed.groups)) == 2


def test_sb09_a_repeated_call_has_the_effect_of_one(world: World) -> None:
    world.start()
    buffer = world.buffer
    prompts = [(Prompt("a"), 1), (Prompt("b"), 2)]
    for _ in range(2):
        buffer.admit("math", prompts, epoch=1, cursor=0, target=9, step=1)
    leases = world.lease(9)
    assert len(leases) == 2
    assert [world.put(leases) for _ in range(2)] == [[PutOutcome.COMPLETED] * 2, [PutOutcome.DUPLICATE] * 2]
    assert world.claim(1) == world.claim(1)
    for _ in range(2):
        buffer.publish(world.held, 1, uri="u", digest="d")
        buffer.commit(world.held, 1)
        buffer.checkpoint(world.held, 1)
    states = {buffer.open_batch("math", "b", "train", step=2).handle for _ in range(2)}
    assert len(states) == 1
    counts = buffer.counts("math")
    assert (counts.progress["admitted"], counts.progress["consumed"], counts.dropped) == (2, 2, {"trained": 2})


@pytest.mark.parametrize("seed", range(6))
def test_sb01_whoever_dies_between_any_two_calls_no_acknowledged_group_and_no_prompt_is_lost(
    world: World, seed: int
) -> None:
    """A process that is killed makes no further call. Here one dies before a random call, again and again."""
    world.start(math={"max_staleness": 3, "lease_s": 600, "max_deaths": 50})
    rng, buffer = random.Random(seed), world.buffer
    acknowledged: set[int] = set()
    launches = 0
    for _ in range(60):
        move = rng.choice(["produce", "worker dies", "work", "train", "trainer dies"])
        if move == "produce":
            world.admit(rng.randint(1, 4))
        elif move in ("work", "worker dies"):
            leases = world.lease(rng.randint(1, 4))
            if move == "worker dies" and leases:
                world.run_out(leases)
                assert buffer.reap("math").requeued == len(leases)
            else:
                acknowledged |= {lease.group_id for lease in leases}
                world.put(leases)
        elif move == "train":
            step = buffer.clock("math").committed + 1
            if isinstance(buffer.claim(world.held, step, {"math": 2}), Claimed) and rng.random() < 0.7:
                buffer.commit(world.held, step)
                if rng.random() < 0.5:
                    buffer.publish(world.held, step, uri="u", digest=f"{launches}-{step}")
        else:
            launches += 1
            old, clock = world.held, buffer.clock("math")
            world.begin(rng.randint(clock.history, clock.committed), launch_id=f"again-{launches}")
            with pytest.raises(FencedError):
                buffer.commit(old, clock.committed + 1)
        world.check()
    counts = buffer.counts("math")
    assert counts.dropped == {}
    assert sum(counts.statuses.values()) == counts.progress["cursor"]
    for group_id in acknowledged:
        assert buffer.inspect("math", group_id)["status"] in ("completed", "claimed", "archived", "expired")
