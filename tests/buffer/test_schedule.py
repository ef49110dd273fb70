"""Batches whose sizes change by train step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollq.buffer.rules.batch_sizes import groups_at, groups_through
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.values.rollouts import Status
from support.buffer_run import World

SCHEDULES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 5)), max_size=4, unique_by=lambda entry: entry[0])


@settings(deadline=None)
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


def test_senseless_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        TaskRules(batch_groups=2, tail_batch_trigger_size=-1, tail_batch_max_tries=3)
    with pytest.raises(ValueError, match="never get older than max_staleness = 1"):
        TaskRules(batch_groups=2, max_staleness=1, max_token_staleness=2)
