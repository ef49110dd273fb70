import pytest
from pydantic import ValidationError

from rollq.buffer.schema import Status
from rollq.buffer.settings import TaskRules
from rollq.producer.settings import ProducerSettings
from rollq.producer.strategy import State, plan, step_of, target_groups

ASYNC = ProducerSettings(strategy="async")
SYNC = ProducerSettings(strategy="sync")


def rules(batch: int = 4, staleness: int = 0, interval: int = 1) -> TaskRules:
    return TaskRules(batch_groups=batch, max_staleness=staleness, sync_weights_interval=interval)


def state(version: int = 0, consumed: int = 0, control: str = "run", **statuses: int) -> State:
    return State(version, control, consumed, {Status(name): count for name, count in statuses.items()})


@pytest.mark.parametrize(
    ("settings", "rule", "now", "room"),
    [
        pytest.param(SYNC, rules(4), state(), 4, id="sync schedules exactly the batch"),
        pytest.param(SYNC, rules(4), state(pending=1, running=1, completed=1), 1, id="sync fills up the batch"),
        pytest.param(SYNC, rules(4), state(completed=3, filtered=1), 1, id="a filtered group is replaced"),
        pytest.param(SYNC, rules(4), state(completed=3, failed=1), 1, id="a failed group is replaced"),
        pytest.param(SYNC, rules(4), state(completed=3, aborted=1), 1, id="an aborted group is rolled again"),
        pytest.param(SYNC, rules(4, interval=3), state(), 12, id="sync makes all steps of one synchronisation"),
        pytest.param(SYNC, rules(4, staleness=5), state(), 4, id="sync ignores the staleness that is allowed"),
        pytest.param(SYNC, rules(4), state(version=1, consumed=4), 4, id="a new version makes room for its step"),
        pytest.param(SYNC, rules(4), state(version=0, consumed=4), 0, id="a trained step waits for its weights"),
        pytest.param(ASYNC, rules(10), state(completed=9), 1, id="async without over-sampling"),
        pytest.param(ASYNC, rules(4, staleness=1), state(), 8, id="async runs ahead as far as staleness allows"),
        pytest.param(ASYNC, rules(4, staleness=1, interval=2), state(), 16, id="the threshold counts train steps"),
        pytest.param(ASYNC, rules(2), state(consumed=1), 1, id="what was trained counts towards the target"),
        pytest.param(ASYNC, rules(4), state(claimed=4), 0, id="a claimed batch counts towards the target"),
        pytest.param(ASYNC, rules(4), state(expired=4, archived=9), 4, id="expired and archived groups do not count"),
        pytest.param(ASYNC, rules(4), state(pending=9), 0, id="a target that shrank leaves no room"),
    ],
)
def test_room_is_what_the_cumulative_target_leaves(
    settings: ProducerSettings, rule: TaskRules, now: State, room: int
) -> None:
    assert plan(settings, rule, now, 0.0).room == room


def test_oversampling_adds_a_fixed_budget_to_the_target() -> None:
    settings = ProducerSettings(over_sample=1.0)
    # batch 4, two steps allowed and half of a third trained: target 8 + budget 4
    made = plan(settings, rules(4, staleness=1), state(completed=7), 0.0)
    assert (made.target, made.room) == (12, 5)


def test_oversampling_rounds_up() -> None:
    assert plan(ProducerSettings(over_sample=0.1), rules(4), state(), 0.0).target == 5


def test_sync_refuses_an_oversampling_budget() -> None:
    with pytest.raises(ValidationError, match="over_sample needs strategy = 'async'"):
        ProducerSettings(strategy="sync", over_sample=0.5)


@pytest.mark.parametrize("version", range(6))
@pytest.mark.parametrize("threshold", [1, 2, 3, 6])
def test_no_step_past_the_run_ahead_bound_is_scheduled(version: int, threshold: int) -> None:
    batch = 3
    target = target_groups(rules(batch), version, threshold)
    last = step_of(target - 1, batch)
    assert last - version - 1 < threshold
    assert step_of(target, batch) - version - 1 >= threshold


def test_production_stops_at_the_bound_and_goes_on_with_a_newer_version() -> None:
    rule = rules(4, staleness=1)
    stopped = plan(ASYNC, rule, state(version=3, consumed=16, pending=4), 0.0)
    assert (stopped.room, "version 3" in stopped.reason) == (0, True)
    assert plan(ASYNC, rule, state(version=4, consumed=16, pending=4), 0.0).room == 4


@pytest.mark.parametrize(
    ("now", "memory", "reason"),
    [
        (state(control="pause"), 0.0, "'pause'"),
        (state(control="drain"), 0.0, "'drain'"),
        (state(version=-1), 0.0, "no trainer has begun"),
        (state(), 0.8, "80% of maxmemory"),
    ],
)
def test_nothing_is_scheduled_and_the_reason_is_told(now: State, memory: float, reason: str) -> None:
    made = plan(ProducerSettings(over_sample=1.0), rules(), now, memory)
    assert made.room == 0
    assert reason in made.reason


def test_steps_count_from_one() -> None:
    assert [step_of(index, 3) for index in range(7)] == [1, 1, 1, 2, 2, 2, 3]
