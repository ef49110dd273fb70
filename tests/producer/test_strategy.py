from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.values.memory_use import Fullness
from rollq.buffer.values.rollouts import Status
from rollq.producer.settings import ProducerSettings
from rollq.producer.strategy import TaskState, draw_on, over_sampled, plan_production, step_of, too_little_kept

ASYNC = ProducerSettings(strategy="async")
SYNC = ProducerSettings(strategy="sync")


def rules(batch: int = 4, staleness: int = 0, interval: int = 1, **more: Any) -> TaskRules:
    return TaskRules(batch_groups=batch, max_staleness=staleness, sync_weights_interval=interval, **more)


def state(version: int = 0, consumed: int = 0, control: str = "run", **statuses: int) -> TaskState:
    counts = {Status(name): count for name, count in statuses.items()}
    return TaskState(version, version + 1, control, "", consumed, counts)


def outcomes(seen: int, kept: int) -> TaskState:
    return replace(state(), outcomes=seen, kept=kept)


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
        pytest.param(ASYNC, rules(4), state(gathered=1, cooling=1), 2, id="gathered and cooling groups count"),
        pytest.param(
            ASYNC, rules(4, staleness=8, max_uses=4), state(), 9, id="each use of a group is one less to make"
        ),
        pytest.param(
            ASYNC, rules(4, staleness=8, max_uses=4), state(4, 16, completed=9), 0, id="copies count like others"
        ),
        pytest.param(
            ASYNC, rules(4, staleness=1, max_uses=4), state(), 8, id="a batch is generated beside the trained"
        ),
        pytest.param(
            ASYNC, rules(4, staleness=0, max_uses=4), state(), 4, id="a group that is fresh once is used once"
        ),
        pytest.param(
            ASYNC,
            rules(4, staleness=8, max_uses=4, reuse_cooldown_steps=2),
            state(),
            16,
            id="cooling groups cannot be used",
        ),
        pytest.param(
            ASYNC,
            rules(4, staleness=3, interval=2, max_uses=9),
            state(1, 12),
            8,
            id="a stock counts from the last step",
        ),
    ],
)
def test_xp01_xp03_room_is_what_the_cumulative_target_leaves(
    settings: ProducerSettings, rule: TaskRules, now: TaskState, room: int
) -> None:
    made = plan_production(settings, rule, now, Fullness())
    assert max(0, made.room) == room


def test_xp02_the_budget_of_oversampling_is_a_share_of_the_batch_beyond_the_target() -> None:
    """Target 10, 9 available, batch 4, over_sample 1.0: 5 launches, 14 in total."""
    rule = rules(4, staleness=1, schedule=[(2, 6)])
    made = plan_production(ProducerSettings(over_sample=1.0), rule, state(completed=9), Fullness())
    assert (made.target, made.room, made.last_step) == (14, 5, 2)


@pytest.mark.parametrize(
    ("share", "batch", "budget"), [(0.0, 4, 0), (0.1, 4, 1), (0.5, 4, 2), (1.0, 4, 4), (2.5, 3, 8)]
)
def test_xp02_the_budget_is_rounded_up(share: float, batch: int, budget: int) -> None:
    assert over_sampled(ProducerSettings(over_sample=share), rules(batch), state()) == budget


def test_xp02_the_budget_is_of_the_batch_that_is_trained_next() -> None:
    rule = rules(4, schedule=[(3, 10)])
    settings = ProducerSettings(over_sample=0.5)
    assert [over_sampled(settings, rule, state(version=version)) for version in (0, 1, 2, 3)] == [2, 2, 5, 5]


@pytest.mark.parametrize(
    ("seen", "kept", "budget"),
    [
        pytest.param(7, 1, 1, id="the window is not full yet"),
        pytest.param(8, 8, 1, id="all are kept"),
        pytest.param(8, 4, 5, id="half are kept: one batch more"),
        pytest.param(8, 3, 8, id="three of eight: five thirds of a batch more"),
        pytest.param(9, 9, 1, id="a window that is more than full"),
        pytest.param(9, 3, 9, id="a window that is more than full, and a third is kept"),
        pytest.param(8, 2, 13, id="a quarter: three batches more"),
        pytest.param(8, 1, 13, id="not more than three batches more"),
        pytest.param(8, 0, 13, id="nothing is kept"),
    ],
)
def test_oversampling_adapts_to_the_keep_rate_by_setting(seen: int, kept: int, budget: int) -> None:
    rule = rules(4, keep_window=8)
    settings = ProducerSettings(over_sample=0.25, adaptive_over_sample=True)
    assert over_sampled(settings, rule, outcomes(seen, kept)) == budget
    assert over_sampled(ProducerSettings(over_sample=0.25), rule, outcomes(seen, kept)) == 1


@pytest.mark.parametrize(
    ("trigger", "expired", "pools", "tail_batch"),
    [
        pytest.param(0, 9, (Status.ABORTED, Status.EXPIRED), False, id="at once"),
        pytest.param(-1, 0, (Status.ABORTED, Status.EXPIRED), False, id="what is dropped is in no pool"),
        pytest.param(3, 2, (Status.ABORTED,), False, id="too few have expired"),
        pytest.param(1, 0, (Status.ABORTED,), False, id="none has expired"),
        pytest.param(1, 1, (Status.EXPIRED, Status.ABORTED), True, id="one is enough"),
        pytest.param(3, 3, (Status.EXPIRED, Status.ABORTED), True, id="a tail batch"),
        pytest.param(3, 4, (Status.EXPIRED, Status.ABORTED), True, id="a larger one"),
    ],
)
def test_xs01_xp04_which_pools_are_drawn_on_and_when_it_is_a_tail_batch(
    trigger: int, expired: int, pools: tuple[Status, ...], tail_batch: bool
) -> None:
    rule = rules(4, tail_batch_trigger_size=trigger)
    assert draw_on(rule, state(expired=expired, aborted=1)) == (pools, tail_batch)


def test_without_an_expired_group_there_is_no_tail_batch() -> None:
    assert draw_on(rules(4, tail_batch_trigger_size=1), state()) == ((Status.ABORTED,), False)


def test_what_is_outstanding_is_a_sum() -> None:
    assert state(consumed=5, pending=3, running=1).outstanding == 9


def test_xp04_a_tail_batch_is_not_oversampled() -> None:
    settings, rule = ProducerSettings(over_sample=1.0), rules(4, tail_batch_trigger_size=3)
    assert plan_production(settings, rule, state(expired=2), Fullness()).target == 8
    assert plan_production(settings, rule, state(expired=3), Fullness()).target == 4


@pytest.mark.parametrize(
    ("outcomes", "kept", "rate", "stops"),
    [
        (7, 0, 0.5, False),
        (8, 3, 0.5, True),
        (8, 4, 0.5, False),
        (8, 6, 0.5, False),
        (9, 4, 0.5, True),
        (8, 0, 0.0, False),
        (8, 7, 1.0, True),
        (8, 8, 1.0, False),
    ],
)
def test_too_little_is_kept_when_a_full_window_says_so(outcomes: int, kept: int, rate: float, stops: bool) -> None:
    assert too_little_kept(outcomes, kept, 8, rate) is stops


def test_sync_refuses_an_oversampling_budget() -> None:
    with pytest.raises(ValidationError, match="over_sample needs strategy = 'async'"):
        ProducerSettings(strategy="sync", over_sample=0.5)


@pytest.mark.parametrize("version", range(6))
@pytest.mark.parametrize("threshold", [1, 2, 3, 6])
def test_xp05_no_step_past_the_run_ahead_bound_is_scheduled(version: int, threshold: int) -> None:
    rule = rules(3, staleness=threshold - 1)
    made = plan_production(ASYNC, rule, state(version=version), Fullness())
    assert made.last_step - version - 1 == threshold - 1
    assert step_of(made.target - 1, rule, made.last_step) == made.last_step
    assert step_of(made.target - 1, rule, made.last_step + 9) == made.last_step
    assert step_of(made.target, rule, made.last_step + 9) == made.last_step + 1


def test_xp05_production_stops_at_the_bound_and_continues_with_a_newer_version() -> None:
    rule = rules(4, staleness=1)
    stopped = plan_production(ASYNC, rule, state(version=3, consumed=16, pending=4), Fullness())
    assert (stopped.room, "version 3" in stopped.reason) == (0, True)
    assert plan_production(ASYNC, rule, state(version=4, consumed=16, pending=4), Fullness()).room == 4


@pytest.mark.parametrize(
    ("now", "memory", "reason"),
    [
        (state(control="pause"), 0.0, "'pause'"),
        (state(control="drain"), 0.0, "'drain'"),
        (state(version=-1), 0.0, "no trainer has started"),
        (state(), 0.8, "80% of maxmemory"),
        (state(), 0.93, "93% of maxmemory"),
        (state(pending=99), 0.0, "everything that version 0 allows is scheduled"),
    ],
)
def test_nothing_is_scheduled_for_a_reason(now: TaskState, memory: float, reason: str) -> None:
    made = plan_production(ProducerSettings(over_sample=1.0), rules(), now, Fullness(memory))
    assert made.room == 0
    assert reason in made.reason


def test_a_budget_that_is_used_up_is_named() -> None:
    made = plan_production(ASYNC, rules(), state(), Fullness(0.81, "payloads.max_buffer_bytes"))
    assert made.room == 0
    assert "groups take 81% of payloads.max_buffer_bytes" in made.reason
    assert "raise payloads.max_buffer_bytes" in made.reason


@pytest.mark.parametrize(("expected", "admitted"), [(0, 16), (700, 10), (790, 1), (799, 1), (800, 0)])
def test_no_more_is_planned_than_a_budget_has_room_for(expected: float, admitted: int) -> None:
    fullness = Fullness.of_groups(expected, 10.0, 1000, "payloads.max_buffer_bytes")
    assert plan_production(ASYNC, rules(16), state(), fullness).room == admitted


def test_a_budget_does_not_limit_groups_of_unknown_size() -> None:
    fullness = Fullness.of_groups(0, 0, 1000, "payloads.max_buffer_bytes")
    assert plan_production(ASYNC, rules(16), state(), fullness).room == 16


def test_the_plan_says_why_a_task_was_stopped() -> None:
    stopped = replace(state(control="stopped"), control_reason="too little is kept")
    assert (
        plan_production(ASYNC, rules(), stopped, Fullness()).reason
        == "the task is set to 'stopped': too little is kept"
    )
    assert plan_production(ASYNC, rules(), state(control="pause"), Fullness()).reason == "the task is set to 'pause'"


def test_a_plan_with_a_reason_has_no_room() -> None:
    made = plan_production(ASYNC, rules(4), state(control="pause"), Fullness())
    assert (made.target, made.outstanding, made.room) == (4, 0, 0)


def test_steps_count_from_one() -> None:
    assert [step_of(index, rules(3), 9) for index in range(7)] == [1, 1, 1, 2, 2, 2, 3]


def test_groups_beyond_the_last_step_are_for_it_too() -> None:
    assert [step_of(index, rules(3), 2) for index in range(9)] == [1, 1, 1, 2, 2, 2, 2, 2, 2]


def test_no_group_is_for_a_step_whose_batch_is_empty() -> None:
    rule = rules(2, schedule=[(2, 0), (4, 1)])
    assert [step_of(index, rule, 6) for index in range(5)] == [1, 1, 4, 5, 6]


def test_before_a_trainer_begins_nothing_is_due() -> None:
    assert plan_production(SYNC, rules(4), state(version=-1), Fullness()).target == 0
