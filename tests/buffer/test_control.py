"""What lets production run, pause and end, and what it reports."""

import pytest

from rollq.buffer.errors import ConfigError, FencedError
from rollq.buffer.replies import Control
from rollq.buffer.rollouts import GroupResult
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
