"""Groups that are trained more than once, batches whose sizes change, long answers that a batch waits for, gathered
batches, and what stops and what is told."""

from collections.abc import Iterator

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollq.buffer.batch_sizes import groups_at, groups_through
from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import BatchOver, ConfigError, FencedError, HistoryGone
from rollq.buffer.replies import Control, PutOutcome, Shortfall
from rollq.buffer.rollouts import GroupResult, PipelineOutput, Prompt, Status
from rollq.buffer.settings import TaskRules
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.server import EmbeddedServer
from support.buffer_run import World, make_sample


@pytest.fixture
def world(any_server: EmbeddedServer, run_name: str) -> Iterator[World]:
    with Buffer.connect(any_server.url, run_name) as buffer:
        yield World(buffer)


def payload(world: World, step: int, **sizes: int) -> list[list[int]]:
    groups = world.buffer.fetch(world.claim(step, **sizes).groups)
    return [list(sample.segments[0].response_ids) for group in groups for sample in group.samples]


# -- reuse ----------------------------------------------------------------------------------------------------------


def test_a_group_is_trained_again_with_the_same_samples_and_no_more_than_max_uses(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 3}).complete(2)
    first = payload(world, 1)
    world.train(1)
    assert world.statuses() == {"completed": 2, "archived": 2}
    again = payload(world, 2)
    assert again == first
    world.train(2)
    assert world.statuses() == {"archived": 4}
    assert world.buffer.counts("math").progress["reused"] == 2
    world.check()


def test_a_group_rests_for_the_cooldown_before_it_is_trained_again(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 9, "reuse_cooldown_steps": 2}).complete(6)
    for step in (1, 2, 3):
        assert world.statuses()["completed"] >= 2
        world.train(step)
        world.check()
    # those of step 1 are back for step 4, the others still rest
    assert world.statuses() == {"completed": 2, "cooling": 4, "archived": 6}
    assert sorted(group.oldest_version for group in world.claim(4).groups) == [0, 0]


def test_no_group_is_trained_again_past_the_bound_of_staleness(world: World) -> None:
    world.start(math={"max_uses": 5, "max_staleness": 0}).complete(2)
    world.train(1)
    assert world.statuses() == {"archived": 2}


def test_one_that_grows_too_old_while_it_waits_is_dropped_and_its_prompt_not_sampled_again(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 1}).complete(2)
    world.train(1)
    world.complete(2)
    world.train(2, math=0)
    assert world.buffer.expire("math") == 2
    counts = world.buffer.counts("math")
    assert counts.dropped == {"reused": 2}
    assert counts.statuses[Status.EXPIRED] == 0
    world.check()


def test_a_replay_trains_the_same_batches_and_makes_no_second_copy(world: World) -> None:
    world.start(math={"max_uses": 3, "max_staleness": 9}).complete(2)
    batches = [payload(world, step) for step in (1, 2) if world.train(step)]
    before = world.statuses()
    world.begin(0, launch_id="after a crash")
    assert [payload(world, step) for step in (1, 2) if world.train(step)] == batches
    assert world.statuses() == before
    world.check()


def test_prompts_that_are_sampled_anew_after_a_divergence_leave_no_copy_behind(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 9}).complete(2)
    world.train(1)
    world.begin(0, mode="regenerate", launch_id="after a divergence")
    assert world.statuses() == {"pending": 2}
    assert world.buffer.counts("math").dropped == {"reused": 2}
    world.check()


def test_trained_groups_that_are_not_kept_are_trained_again_all_the_same(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 9, "resume": "fresh"}).complete(2)
    world.train(1)
    assert world.statuses() == {"completed": 2}
    world.check()


def test_copies_of_groups_are_as_old_as_their_dead_weights_count(world: World) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 9, "reuse_cooldown_steps": 4})
    for step in (1, 2, 3):
        world.complete(2)
        world.train(step)
    world.complete(2)
    world.claim(4)  # and the trainer dies before it commits
    world.begin(1, launch_id="after a crash")
    for step in (2, 3, 4):
        assert {group.staleness for group in world.buffer.query({"status": "cooling"})} <= set(range(step))
        world.train(step)
    # what versions 2 and 3 made in the dead history counts as version 1
    cooling = world.buffer.query({"status": "cooling"})
    assert sorted(group.staleness for group in cooling) == [3, 3, 3, 3, 3, 3, 4, 4]
    world.check()


# -- sizes by step --------------------------------------------------------------------------------------------------

SCHEDULES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 5)), max_size=4, unique_by=lambda entry: entry[0])


@given(st.integers(1, 5), SCHEDULES.map(sorted), st.integers(0, 15))
def test_batches_add_up(batch_groups: int, schedule: list[tuple[int, int]], step: int) -> None:
    one_by_one = sum(groups_at(batch_groups, schedule, s) for s in range(1, step + 1))
    assert groups_through(batch_groups, schedule, step) == one_by_one


def test_the_target_leaves_room_by_the_batches_that_were_trained_under_the_schedule(world: World) -> None:
    schedule = [[2, 3], [3, 0], [4, 1]]
    world.start(math={"schedule": schedule, "max_staleness": 9}).complete(2)
    rules = world.buffer.rules("math")
    for step in (1, 2, 3, 4):
        wanted = groups_at(rules.batch_groups, rules.schedule, step)
        done = groups_through(rules.batch_groups, rules.schedule, step - 1)
        waiting = world.buffer.counts("math").statuses[Status.COMPLETED]
        assert world.admit(9, target=done + waiting + 3) == 3
        world.put(world.lease(3))
        world.train(step, math=wanted)
    assert world.buffer.counts("math").progress["consumed"] == 2 + 3 + 0 + 1
    world.check()


@pytest.mark.parametrize("schedule", [[[0, 4]], [[3, 4], [2, 4]], [[2, 4], [2, 5]], [[2, -1]], [[2, 1001]]])
def test_a_schedule_that_makes_no_sense_is_refused(schedule: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="schedule"):
        TaskRules.model_validate({"batch_groups": 2, "schedule": schedule})


# -- long answers ---------------------------------------------------------------------------------------------------


def test_a_batch_waits_for_groups_that_the_next_would_find_too_old(world: World) -> None:
    world.start(math={"max_staleness": 0})
    world.admit(3)
    slow, *quick = world.lease(3)
    world.put(quick)
    assert world.buffer.claim(world.held, 1, {"math": 2}) == Shortfall(1, {"math": 2}, {"math": 2}, {"math": 1})
    world.put([slow])
    world.claim(1)


def test_a_batch_does_not_wait_for_groups_that_are_young_enough_for_the_next(world: World) -> None:
    world.start(math={"max_staleness": 1})
    world.admit(3)
    _, *quick = world.lease(3)
    world.put(quick)
    world.claim(1)


def test_a_batch_waits_for_nobody_when_stragglers_may_expire(world: World) -> None:
    world.start(math={"max_staleness": 0, "stragglers": "expire"})
    world.admit(3)
    _, *quick = world.lease(3)
    world.put(quick)
    world.claim(1)


def test_kept_tokens_of_an_interrupted_group_say_how_old_it_will_be(world: World) -> None:
    world.start(math={"max_staleness": 1, "partial_rollout": True})
    world.admit(3)
    slow, *quick = world.lease(3)
    assert world.put([slow], status="a") == [PutOutcome.ABORTED]
    world.put(quick)
    world.train(1)
    clock = world.buffer.clock("math")
    assert world.buffer.recycle("math", epoch=clock.epoch, target=99, limit=9) == 1
    (slow,) = world.lease(1)
    world.complete(2)
    assert world.buffer.readiness("math", 2) == (2, 1)
    world.put([slow], version=0)
    assert world.buffer.readiness("math", 2) == (3, 0)


def test_samples_that_were_reset_do_not_say_how_old_a_group_will_be(world: World) -> None:
    world.start(math={"max_staleness": 1}).admit(1)
    (lease,) = world.lease(1)
    for version in (1, 2, 3):
        world.buffer.publish(world.held, version, uri="u", digest=str(version))
    assert world.buffer.put([GroupResult(lease, (make_sample(0), make_sample(2)))]) == [PutOutcome.EXPIRED]
    assert world.buffer.recycle("math", epoch=world.held.epoch, target=10, limit=1) == 1
    assert len(world.lease(1)) == 1
    assert world.buffer.readiness("math", 4) == (0, 1), "the sibling that stayed is of version 2, too old for step 5"
    assert world.buffer.readiness("math", 3) == (0, 0)


def test_a_group_that_a_dead_worker_held_is_not_waited_for(world: World) -> None:
    world.start(math={"max_staleness": 0})
    world.admit(1)
    leases = world.lease(1)
    assert world.buffer.readiness("math", 1) == (0, 1)
    world.buffer.hand_back(leases)
    assert world.buffer.readiness("math", 1) == (0, 0)


# -- interruptions, control, what is told ---------------------------------------------------------------------------


def test_xp13_a_group_that_was_interrupted_too_often_is_to_finish(world: World) -> None:
    world.start(math={"tail_batch_max_tries": 2, "max_staleness": 9, "partial_rollout": True})
    world.admit(1)
    for interruptions in range(3):
        (lease,) = world.lease(1)
        assert lease.must_finish is (interruptions >= 2)
        world.put([lease], status="a")
        world.buffer.recycle("math", epoch=1, target=99, limit=9)


@pytest.mark.parametrize(
    ("control", "admits", "leases"),
    [
        (Control.RUN, True, True),
        (Control.PAUSE, False, False),
        (Control.SLEEP, False, False),
        (Control.STOPPED, False, False),
        (Control.DONE, False, True),
    ],
)
def test_control_says_what_goes_on(world: World, control: Control, admits: bool, leases: bool) -> None:
    world.start()
    world.admit(1)
    if control is Control.SLEEP:
        world.buffer.sleep(world.held, "because")
    else:
        world.buffer.set_control("math", control, "because")
    assert world.buffer.clock("math").control_reason == "because"
    assert bool(world.admit(1)) is admits
    assert bool(world.lease(1)) is leases


@pytest.mark.parametrize("control", [Control.RUN, Control.PAUSE, Control.DONE])
def test_a_sleep_ends_with_its_trainer_and_what_was_wanted_before_holds_again(world: World, control: Control) -> None:
    world.start()
    world.buffer.set_control("math", control, "because")
    zombie = world.held
    world.buffer.sleep(zombie, "step 1 is being trained")
    assert world.buffer.clock("math").control_reason == "step 1 is being trained"
    world.begin(0, launch_id="again")
    clock = world.buffer.clock("math")
    assert (clock.control, clock.control_reason) == (control, "because")
    with pytest.raises(FencedError):
        world.buffer.sleep(zombie, "step 1 is being trained")


def test_what_is_wanted_of_production_while_engines_sleep_holds_when_they_wake(world: World) -> None:
    world.start()
    world.buffer.sleep(world.held, "step 1 is being trained")
    world.buffer.set_control("math", Control.PAUSE, "by hand", only_from=Control.RUN)
    assert world.buffer.clock("math").control is Control.SLEEP
    world.buffer.sleep(world.held, "")
    assert world.buffer.clock("math").control is Control.PAUSE
    with pytest.raises(ConfigError, match="put to sleep by the trainer"):
        world.buffer.set_control("math", Control.SLEEP)


def test_outcomes_are_remembered_as_far_as_the_window_goes_and_forgotten_when_production_goes_on(world: World) -> None:
    world.start(math={"keep_window": 3, "group_size": 1})
    world.admit(5)
    leases = world.lease(5)
    for lease, filtered in zip(leases, (False, True, True, False, True), strict=True):
        world.buffer.put([GroupResult(lease, (make_sample(0),), filtered=filtered)])
    counts = world.buffer.counts("math")
    assert (counts.outcomes, counts.kept) == (3, 1)
    world.buffer.set_control("math", Control.STOPPED, "too little is kept")
    world.buffer.set_control("math", Control.RUN)
    assert world.buffer.counts("math").outcomes == 0


def test_xp07_what_was_produced_is_told_once(world: World) -> None:
    world.start(math={"group_size": 1})
    world.buffer.take_production("math")
    world.admit(3)
    leases = world.lease(3)
    world.buffer.put([GroupResult(leases[0], (make_sample(0, tokens=3, reward=1.0),), generate_s=2.0)])
    world.buffer.put([GroupResult(leases[1], (make_sample(0, tokens=4, reward=0.5),), filtered=True, generate_s=3.0)])
    world.buffer.put([GroupResult(leases[2], (make_sample(0, tokens=1, status="a"),), generate_s=9.0)])
    told = world.buffer.take_production("math")
    assert told.timings_ms == (2000, 3000)
    assert told.sums == {
        "completed": 1, "filtered": 1, "aborted": 1, "tokens": 8, "reward_sum": 1.5, "reward_count": 2,
    }  # fmt: skip
    told = world.buffer.take_production("math")
    assert (told.timings_ms, told.sums) == ((), {})


# -- batches that are gathered --------------------------------------------------------------------------------------


def open_evaluation(world: World, prompts: int = 2) -> str:
    state = world.buffer.open_batch("held_out", "0/held_out", "eval", step=0)
    world.buffer.fill_batch("held_out", state.handle, 0, [Prompt(f"question {i}") for i in range(prompts)], last=True)
    return state.handle


def test_groups_of_an_evaluation_are_gathered_and_never_claimed(world: World) -> None:
    world.start(math={}, held_out={"kind": "eval"})
    handle = open_evaluation(world)
    assert world.put(world.lease(2, "held_out")) == [PutOutcome.GATHERED] * 2
    assert world.buffer.batch_by_handle("held_out", handle).complete
    with pytest.raises(ValueError, match="never trained"):
        world.buffer.claim(world.held, 1, {"held_out": 2})
    assert world.buffer.train_tasks() == ["math"]
    world.check()


def test_xm01_an_evaluation_is_made_by_the_version_that_it_names_alone(world: World) -> None:
    world.start(math={}, held_out={"kind": "eval"}).complete(2)
    handle = open_evaluation(world, prompts=3)
    assert world.buffer.batch_by_handle("held_out", handle).version == 0
    old, mixed, _ = world.lease(3, "held_out")
    world.train(1)
    assert world.lease(3, "held_out", version=1) == (), "its weights are not those that the evaluation names"
    spans = make_sample(0).segments[0]
    newer = make_sample(1).segments[0]
    sample = make_sample(0)
    both = type(sample)(segments=(spans, newer), status=sample.status, finish_reason=sample.finish_reason, reward=1.0)
    assert world.buffer.put([GroupResult(mixed, (sample, both))]) == [PutOutcome.RESTARTED]
    assert world.put([old], version=0) == [PutOutcome.GATHERED]
    assert world.statuses("held_out") == {"pending": 1, "gathered": 1, "running": 1}
    (again,) = world.lease(3, "held_out", version=0)
    assert all(not sample.segments for sample in again.samples), "nothing of the other version is kept"
    world.check()


def test_an_interrupted_group_of_a_batch_goes_back_to_pending_with_what_it_has(world: World) -> None:
    world.start(math={"partial_rollout": True})
    state = world.buffer.open_batch("math", "1", "train", step=1)
    world.buffer.fill_batch("math", state.handle, 0, [Prompt("question")], last=True)
    assert world.put(world.lease(1), status="a") == [PutOutcome.RESTARTED]
    (lease,) = world.lease(1)
    np.testing.assert_array_equal(lease.samples[0].segments[0].response_ids, make_sample(0).segments[0].response_ids)
    assert world.put([lease]) == [PutOutcome.GATHERED]
    assert world.buffer.batch("math", "1") == world.buffer.batch_by_handle("math", state.handle)
    world.check()


def test_tc01_a_batch_that_stands_is_returned_for_the_same_content_and_refuses_another(world: World) -> None:
    world.start()
    state = world.buffer.open_batch("math", "7", "train", step=7, digest="a")
    assert world.buffer.open_batch("math", "7", "train", step=7, digest="a") == state
    with pytest.raises(ValueError, match="'7' is running with other content"):
        world.buffer.open_batch("math", "7", "train", step=7, digest="b")


def test_filling_a_batch_again_adds_nothing(world: World) -> None:
    world.start()
    handle = world.buffer.open_batch("math", "7", "train", step=7).handle
    for _ in range(2):
        assert world.buffer.fill_batch("math", handle, 0, [Prompt("a"), Prompt("b")], last=False) == 2
    assert world.buffer.fill_batch("math", handle, 2, [Prompt("c")], last=True) == 3
    assert world.buffer.fill_batch("math", handle, 3, [Prompt("d")], last=True) == 3
    assert world.statuses() == {"pending": 3}
    world.check()


def test_a_gathered_group_is_as_old_as_its_dead_weights_count(world: World) -> None:
    world.start(math={"max_staleness": 1})
    for step in (1, 2, 3):
        world.complete(2)
        world.train(step)
    handle = world.buffer.open_batch("math", "4", "train", step=4).handle
    world.buffer.fill_batch("math", handle, 0, [Prompt("question")], last=True)
    assert world.put(world.lease(1)) == [PutOutcome.GATHERED]
    world.begin(1, launch_id="after a crash")
    (group,) = world.buffer.begin_finalize("math", handle, "nonce", lease_s=10).groups
    assert group.oldest_version == 1
    world.train(2)
    world.train(3)
    world.buffer.end_finalize("math", handle, "nonce", b"{}", {group.group_id: PipelineOutput((1.0, 1.0), None)})
    assert world.statuses()["expired"] == 1, "version 1 is too old for step 4"
    world.check()


def test_batches_that_are_over_are_forgotten_when_many_more_are(world: World) -> None:
    world.start(math={}, held_out={"kind": "eval"})
    handles = []
    for version in range(203):
        handles.append(world.buffer.open_batch("held_out", f"{version}/held_out", "eval", step=0).handle)
        world.buffer.close_evaluation("held_out", handles[-1], orjson.dumps(version))
    assert [state and state.state for state in (world.buffer.batch("held_out", f"{n}/held_out") for n in (2, 3))] == [
        None,
        "finalized",
    ]
    assert world.buffer.close_evaluation("held_out", handles[3]) == b"3"
    keys = task_keys(world.buffer.run, "held_out")
    assert len(list(world.buffer.client.scan_iter(match=keys.batch("*")))) == 200


def test_an_id_that_is_used_again_outlives_its_former_batch(world: World) -> None:
    world.start()
    first = world.buffer.open_batch("math", "1", "train", step=1)
    world.buffer.abort_batch("math", first.handle, "")
    again = world.buffer.open_batch("math", "1", "train", step=1)
    for _ in range(200):
        world.buffer.abort_batch("math", world.buffer.open_batch("math", "2", "train", step=1).handle, "")
    assert world.buffer.running_batches("math") == [again] == [world.buffer.batch("math", "1")]
    with pytest.raises(BatchOver, match=first.handle):
        world.buffer.batch_by_handle("math", first.handle)


def test_a_group_that_leaves_its_batch_is_as_old_as_the_samples_that_it_still_has(world: World) -> None:
    world.start(math={"max_staleness": 1, "tail_batch_trigger_size": -1})
    handle = world.buffer.open_batch("math", "4", "train", step=4).handle
    world.buffer.fill_batch("math", handle, 0, [Prompt("question")], last=True)
    (lease,) = world.lease(1)
    for version in (1, 2, 3):
        world.buffer.publish(world.held, version, uri="u", digest=str(version))
    assert world.buffer.put([GroupResult(lease, (make_sample(0), make_sample(3)))]) == [PutOutcome.RESTARTED]
    world.buffer.begin_finalize("math", handle, "nonce", lease_s=10)
    world.buffer.end_finalize("math", handle, "nonce", b"{}", {})
    assert world.buffer.expire("math") == 0, "version 3 is young enough for step 4"
    assert [group.uid for group in world.buffer.query({"status": "aborted", "staleness": 0})] == [1]
    world.check()


# -- copies ---------------------------------------------------------------------------------------------------------


def test_while_a_copy_is_taken_nothing_is_dropped_or_reset(world: World) -> None:
    world.start(math={"max_staleness": 0, "resume": "fresh"}).complete(3)
    world.buffer.call_task("hold_for_saving", "math", 60_000)
    world.train(1)
    world.buffer.checkpoint(world.held, 1)
    assert world.buffer.expire("math") == 0
    assert world.statuses() == {"completed": 1, "archived": 2}
    world.buffer.call_task("hold_for_saving", "math", 0)
    assert world.buffer.expire("math") == 1
    world.buffer.checkpoint(world.held, 1)
    assert world.statuses() == {"expired": 1}
    world.check()


def test_what_a_copy_held_back_leaves_with_the_next_step_of_a_run_that_keeps_nothing(world: World) -> None:
    world.start(math={"resume": "fresh"}).complete(4)
    world.buffer.call_task("hold_for_saving", "math", 60_000)
    for step in (1, 2):
        world.train(step)
    assert world.statuses() == {"archived": 4}
    world.buffer.call_task("hold_for_saving", "math", 0)
    world.complete(2)
    world.train(3)
    assert world.statuses() == {}
    assert world.buffer.counts("math").dropped == {"trained": 6}
    with pytest.raises(HistoryGone, match="no longer kept"):
        world.claim(2)
    world.check()


def test_the_sizes_of_a_step_stay_as_long_as_its_batch_does(world: World) -> None:
    world.start(math={}, code={})
    for task in ("math", "code"):
        world.complete(2, task)
    world.train(1, math=2, code=2)
    world.buffer.call_task("hold_for_saving", "math", 60_000)
    world.buffer.call_task("hold_for_saving", "code", 60_000)
    world.buffer.checkpoint(world.held, 1)  # waits for the next one
    world.begin(0, launch_id="after a crash")
    assert len(world.claim(1, math=2).groups) == 4, "the batch of step 1 is fixed, with its part of code"


def test_while_a_copy_is_taken_a_batch_passes_over_what_is_too_old(world: World) -> None:
    world.start(math={"order": "fifo", "max_staleness": 1, "stragglers": "expire"}).complete(4)
    world.train(1)
    world.buffer.publish(world.held, 2, uri="u", digest="2")
    world.complete(3)
    world.buffer.call_task("hold_for_saving", "math", 60_000)
    assert [group.group_id for group in world.claim(3).groups] == [5, 6]
    assert world.statuses() == {"completed": 3, "claimed": 2, "archived": 2}
    world.check()


def test_senseless_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        TaskRules(batch_groups=2, tail_batch_trigger_size=-1, tail_batch_max_tries=3)
    with pytest.raises(ValueError, match="never get older than max_staleness = 1"):
        TaskRules(batch_groups=2, max_staleness=1, max_token_staleness=2)
