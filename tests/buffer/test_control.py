"""What lets production run, pause and end, and what it reports."""

import pytest

from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.errors import ConfigError, FencedError
from rollq.buffer.values.rollouts import MOST_ERROR_BYTES, GroupResult, Lease
from support.buffer_run import World, make_sample


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
    with pytest.raises(ConfigError, match="only the trainer that needs their memory"):
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


def broken(lease: Lease, error: str = "the judge is broken") -> GroupResult:
    return GroupResult(lease, (make_sample(0, status="f"),) * len(lease.samples), error=error)


def test_groups_that_fail_in_a_row_are_counted_until_one_ends_in_another_way(world: World) -> None:
    world.start(math={"max_tries": 1, "max_deaths": 2})

    def failed() -> int:
        return world.buffer.counts("math").failed_in_a_row

    world.admit(10)
    a, b, c, d, e, f, g, *_ = world.lease(10)
    assert failed() == 0
    world.buffer.put([broken(a), broken(b)])
    world.buffer.hand_back([c], counted=True, error="the engine is broken")
    assert failed() == 3
    world.buffer.put([broken(d), GroupResult(e, (make_sample(0),) * 2, filtered=True), broken(f)])
    assert failed() == 1, "those before the group that was filtered do not count"
    world.put([g], status="a")
    assert failed() == 1, "an interrupted group says nothing"


def test_groups_that_fail_are_counted_from_0_when_production_continues(world: World) -> None:
    world.start()
    world.admit(1)
    world.buffer.put([broken(lease) for lease in world.lease(1)])
    world.buffer.set_control("math", Control.STOPPED, "all fail")
    assert world.buffer.counts("math").failed_in_a_row == 1
    world.buffer.set_control("math", Control.RUN)
    assert world.buffer.counts("math").failed_in_a_row == 0


def test_the_last_error_of_a_task_is_kept_within_a_bound(world: World) -> None:
    world.start(math={"audit_groups": 0})

    def last() -> str:
        error = world.buffer.counts("math").last_error
        assert error is not None
        assert error.age_s >= 0
        return error.text

    world.admit(4)
    a, b, c, d = world.lease(4)
    assert world.buffer.counts("math").last_error is None
    world.buffer.hand_back([a], counted=True, error="the engine is away")
    assert last() == "the engine is away", "the group has tries left"
    world.buffer.put([broken(b)])
    assert last() == "the judge is broken", "the failed group itself is not kept"
    world.buffer.put([GroupResult(c, (make_sample(0),) * 2, filtered=True, error="all rewards are equal")])
    assert last() == "the judge is broken", "a filter makes no error"
    world.buffer.put([broken(d, "\u00e9" * MOST_ERROR_BYTES)])
    assert last() == "\u00e9" * (MOST_ERROR_BYTES // 2)


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
