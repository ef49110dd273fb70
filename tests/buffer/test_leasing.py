"""Leases and results: order, tries, dead workers, and how a result is filed."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.errors import (
    StaleWorker,
)
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, GroupResult, Prompt, Sample, SampleStatus, Status
from support.buffer_run import World, make_sample, set_clock


def test_groups_are_leased_by_step_then_arrival(world: World) -> None:
    world.start(math={"max_staleness": 1})
    buffer = world.buffer
    buffer.admit("math", [(Prompt("later"), 1)], epoch=1, cursor=0, target=9, step=2)
    buffer.admit("math", [(Prompt("first"), 2)], epoch=1, cursor=1, target=9, step=1)
    buffer.admit("math", [(Prompt("second"), 3)], epoch=1, cursor=2, target=9, step=1)
    assert [lease.prompt.content for lease in world.lease(3)] == ["first", "second", "later"]


def test_tc08_an_evaluation_comes_after_training_of_its_step_and_before_that_of_the_next(world: World) -> None:
    world.start(math={"max_staleness": 1}, held_out={"kind": "eval"})
    buffer = world.buffer
    world.complete(2)
    world.train(1)
    buffer.admit("math", [(Prompt("of step 2"), 3)], epoch=1, cursor=2, target=9, step=2)
    batch = buffer.open_batch("held_out", "1/held_out", "eval", step=1)
    buffer.fill_batch("held_out", batch.handle, 0, [Prompt("evaluation")], last=True)
    buffer.admit("math", [(Prompt("late, of step 1"), 4)], epoch=1, cursor=3, target=9, step=1)
    order: list[object] = []
    for _ in range(3):
        leased = buffer.lease(["math", "held_out"], 1, worker="w", version=1, epoch=1, idle=not order)
        order += [lease.prompt.content for lease in leased.leases]
    assert order == ["late, of step 1", "evaluation", "of step 2"]


def test_the_best_groups_over_several_tasks_are_leased(world: World) -> None:
    world.start(math={}, code={})
    for task, step in (("code", 2), ("math", 1), ("code", 1)):
        cursor = int(world.buffer.counts(task).progress["cursor"])
        world.buffer.admit(task, [(Prompt(f"{task}{step}"), cursor + 1)], epoch=1, cursor=cursor, target=9, step=step)
    leased = world.buffer.lease(["math", "code"], 2, worker="w", version=0, epoch=1)
    assert sorted(str(lease.prompt.content) for lease in leased.leases) == ["code1", "math1"]


def test_a_task_that_refuses_a_worker_keeps_no_lease_of_another_from_it(world: World) -> None:
    world.start(math={"max_staleness": 3}, code={"max_staleness": 0})
    world.admit(1, "math")
    world.admit(1, "code")
    world.buffer.publish(world.held, 1, uri="u", digest="1")
    leased = world.buffer.lease(["math", "code"], 2, worker="w", version=0, epoch=1)
    assert [lease.task for lease in leased.leases] == ["math"]
    with pytest.raises(StaleWorker):
        world.buffer.lease(["math", "code"], 2, worker="w", version=0, epoch=1)


def test_a_repeated_lease_call_grants_the_same_groups(world: World) -> None:
    world.start().admit(4)
    args = ("lease", task_keys(world.buffer.run, "math").clock, world.buffer.incarnation, "w", "nonce", 1, 0, 2, 0, 1)
    first = world.buffer.call(*args)
    again = world.buffer.call(*args)
    assert first == again
    assert len(first) == 3
    assert world.statuses() == {"pending": 2, "running": 2}


def test_a_lease_has_the_row_of_its_prompt(world: World) -> None:
    prompts = [(Prompt("first", row=41), 1), (Prompt("second"), 2)]
    world.start().buffer.admit("math", prompts, epoch=1, cursor=0, target=9, step=1)
    assert [lease.prompt.row for lease in world.lease(2)] == [41, None]


def test_nothing_is_leased_before_a_trainer_has_begun(world: World) -> None:
    world.buffer.create_run()
    world.buffer.register_task("math", TaskRules(batch_groups=2))
    world.admit(2)
    assert world.lease(2, version=0) == ()


def test_a_worker_whose_weights_would_be_too_old_gets_nothing(world: World) -> None:
    world.start(math={"max_staleness": 0})
    world.complete(2)
    world.train(1)
    world.admit(1)
    with pytest.raises(StaleWorker, match="version 0 would be too old at step 2"):
        world.lease(1, version=0)
    assert len(world.lease(1, version=1)) == 1


def test_groups_for_a_step_that_old_weights_are_too_old_for_wait(world: World) -> None:
    world.start(math={"max_staleness": 1})
    world.buffer.publish(world.held, 1, uri="u", digest="d")
    for cursor, step in enumerate((2, 3)):
        world.buffer.admit("math", [(Prompt(f"step {step}"), cursor + 1)], epoch=1, cursor=cursor, target=9, step=step)
    assert [lease.prompt.content for lease in world.lease(2, version=0)] == ["step 2"]
    assert [lease.prompt.content for lease in world.lease(2, version=1)] == ["step 3"]


def test_the_live_weights_serve_every_pending_group(world: World) -> None:
    world.start(math={"max_staleness": 0})
    # over-sampling, and a rewind, leave groups that were meant for a step beyond the bound
    world.buffer.admit("math", [(Prompt("surplus"), 1)], epoch=1, cursor=0, target=9, step=7)
    assert len(world.lease(1)) == 1


def test_a_result_is_filed_once_and_a_repeat_is_a_duplicate(world: World) -> None:
    world.start().admit(1)
    leases = world.lease(1)
    assert world.put(leases) == [PutOutcome.COMPLETED]
    assert world.put(leases) == [PutOutcome.DUPLICATE]
    assert world.buffer.counts("math").progress["produced"] == 1
    world.check()


def test_work_handed_back_is_no_try(world: World) -> None:
    world.start().admit(1)
    (lease,) = world.lease(1)
    assert world.buffer.hand_back([lease]) == 1
    assert world.buffer.hand_back([lease]) == 0
    (again,) = world.lease(1)
    assert (again.group_id, again.attempt, again.tries) == (lease.group_id, 2, 1)
    assert world.put([lease]) == [PutOutcome.REFUSED]
    assert world.put([again]) == [PutOutcome.COMPLETED]


def test_a_group_fails_with_its_last_error_when_its_tries_are_spent(world: World) -> None:
    world.start(math={"max_tries": 2}).admit(1)
    for _ in range(2):
        world.buffer.hand_back(world.lease(1), counted=True, error="engine: out of memory")
    assert world.statuses() == {"failed": 1}
    assert world.buffer.inspect("math", 1)["error"] == "engine: out of memory"
    world.check()


@pytest.mark.parametrize("number", [np.float64, np.float32, np.int64, np.bool_])
def test_a_reward_may_be_a_number_of_numpy(world: World, number: Any) -> None:
    world.start().admit(2)
    plain, other = world.lease(2)
    assert world.put([plain], reward=number(1)) == [PutOutcome.COMPLETED]
    one, *others = (make_sample(0, reward=number(1)) for _ in other.samples)
    failed = replace(make_sample(0, status="f"), error="x")
    assert world.buffer.put([GroupResult(other, (one, *[failed for _ in others]))]) == [PutOutcome.FAILED]
    group = world.buffer.inspect("math", plain.group_id)
    assert float(group["reward"]) == 1.0
    world.check()


def test_an_interruption_is_no_try(world: World) -> None:
    world.start(math={"max_tries": 2, "partial_rollout": True}).admit(1)
    for _ in range(3):
        world.put(world.lease(1), status="a")
        world.buffer.recycle("math", epoch=1, target=9, limit=9)
    world.buffer.hand_back(world.lease(1), counted=True, error="engine failed")
    assert world.statuses() == {"pending": 1}


def test_a_death_is_no_try(world: World) -> None:
    world.start(math={"max_tries": 2}).admit(1)
    for _ in range(2):
        world.run_out(world.lease(1))
        assert world.buffer.reap("math").requeued == 1
    assert world.buffer.inspect("math", 1)["deaths"] == "2"
    world.buffer.hand_back(world.lease(1), counted=True, error="engine failed")
    assert world.statuses() == {"pending": 1}


def test_renewal_keeps_a_lease_and_names_the_lost_ones(world: World) -> None:
    world.start().admit(2)
    kept, lost = world.lease(2)
    world.buffer.hand_back([lost])
    assert world.buffer.renew([kept, lost]).gone == [lost]


def test_failed_groups_are_kept_for_audit_up_to_a_cap(world: World) -> None:
    world.start(math={"max_tries": 1, "audit_groups": 2}).admit(3)
    world.buffer.hand_back(world.lease(3), counted=True, error="boom")
    assert world.statuses() == {"failed": 2}
    assert world.buffer.counts("math").dropped == {"failed": 1}
    world.check()


def test_a_dead_workers_groups_go_to_another_and_its_late_result_is_refused(world: World) -> None:
    world.start().admit(1)
    zombie = world.lease(1, worker="zombie")
    world.run_out(zombie)
    assert world.buffer.reap("math") == (1, 0, False)
    heir = world.lease(1, worker="heir")
    assert heir[0].suspect
    assert world.put(zombie) == [PutOutcome.REFUSED]
    assert world.buffer.renew(zombie).gone == list(zombie)
    assert world.put(heir) == [PutOutcome.COMPLETED]
    assert world.put(zombie) == [PutOutcome.REFUSED]
    assert world.buffer.counts("math").progress["refused"] == 2
    world.check()


def test_an_outage_makes_no_suspects(world: World) -> None:
    world.start().admit(1)
    leases = world.lease(1)
    world.run_out(leases)
    set_clock(world.buffer, "math", reaped_ms=1)
    assert world.buffer.reap("math").held, "nobody reaped for long: everyone was away, not the worker"
    assert world.buffer.reap("math").held, "for one more lease"
    assert world.buffer.renew(leases).gone == []
    assert world.put(leases) == [PutOutcome.COMPLETED]


def test_suspects_run_alone_on_their_last_try(world: World) -> None:
    world.start(math={"max_deaths": 2}).admit(2)
    world.run_out(world.lease(2, worker="dying"))
    assert world.buffer.reap("math").requeued == 2
    world.admit(2)
    busy = world.buffer.lease(["math"], 4, worker="busy", version=0, epoch=1, idle=False)
    assert busy == ((), True), "a busy worker reserves the suspect and drains"
    (alone,) = world.lease(4, worker="busy", idle=True)
    assert alone.alone
    assert alone.suspect
    others = world.lease(4, worker="other", idle=False, suspects_held=1)
    assert [lease.suspect for lease in others] == [False, False]
    world.check()


def test_one_worker_drains_for_a_suspect_and_the_first_idle_one_takes_it(world: World) -> None:
    world.start(math={"max_deaths": 2}).admit(2)
    world.run_out(dead := world.lease(1, worker="dying"))
    world.buffer.reap("math")
    ask = partial(world.buffer.lease, ["math"], 1, version=0, epoch=1)
    assert ask(worker="draining", idle=False).drain
    suspect = task_keys(world.buffer.run, "math").group(dead[0].group_id)
    reserved_ms: Any = world.buffer.client.hget(suspect, "reserved_until_ms")
    lease_ms = 1000 * world.buffer.rules("math").lease_s
    # its groups take longer than a lease
    world.buffer.client.hset(suspect, "reserved_until_ms", int(float(reserved_ms) - 1.5 * lease_ms))
    busy = ask(worker="busy", idle=False)
    assert not busy.drain
    assert [lease.suspect for lease in busy.leases] == [False]
    (alone,) = ask(worker="idle", idle=True).leases
    assert alone.alone


def test_a_worker_that_drained_for_one_task_is_not_filled_by_another_first(world: World) -> None:
    world.start(math={}, code={"max_deaths": 2}).admit(4)
    world.admit(1, "code")
    world.run_out(world.lease(1, "code", worker="dying"))
    assert world.buffer.reap("code").requeued == 1
    ask = partial(world.buffer.lease, ["math", "code"], 5, worker="worker", version=0, epoch=1)
    mixed = ask()
    assert mixed.drain
    assert [lease.task for lease in mixed.leases] == ["math"] * 4
    world.put(mixed.leases)
    world.admit(4)
    (alone,) = ask().leases
    assert alone.task == "code"
    assert alone.alone
    world.check()


@pytest.mark.parametrize(
    ("produced", "outlived", "quarantined", "deaths"),
    [
        (99, 20, 0, 2),  # too few to tell
        (1000, 0, 0, 2),
        (1000, 20, 0, 2),
        (1000, 50, 0, 3),
        (1000, 50, 50, 2),  # many prompts do kill
        (1000, 120, 0, 4),
        (1000, 900, 0, 4),
        (1000, 2000, 0, 4),
    ],
)
def test_a_suspect_runs_alone_once_bad_luck_is_rarer_than_a_group_that_kills(
    world: World, produced: int, outlived: int, quarantined: int, deaths: int
) -> None:
    world.start(math={"max_deaths": 3}).admit(1)
    counted = {"produced": produced, "outlived": outlived, "quarantined": quarantined}
    world.buffer.client.hset(task_keys(world.buffer.run, "math").progress, mapping=counted)  # type: ignore[arg-type]
    for _ in range(deaths):
        (lease,) = world.lease(1)
        assert not lease.alone
        world.run_out([lease])
        assert world.buffer.reap("math") == (1, 0, False)
    (lease,) = world.lease(1)
    assert lease.alone
    world.run_out([lease])
    assert world.buffer.reap("math") == (0, 1, False)
    group = world.buffer.inspect("math", lease.group_id)
    assert group["error"].startswith(f"quarantined: {deaths + 1} workers died with it")
    assert world.buffer.counts("math").progress["quarantined"] == quarantined + 1


def test_deaths_that_a_group_outlived_are_counted(world: World) -> None:
    world.start().admit(1)
    world.run_out(world.lease(1))
    world.buffer.reap("math")
    assert world.put(world.lease(1)) == [PutOutcome.COMPLETED]
    assert world.buffer.counts("math").progress["outlived"] == 1
    assert world.buffer.inspect("math", 1)["deaths"] == "0"


def test_many_suspects_come_back_in_few_turns(world: World) -> None:
    world.start().admit(16)
    world.run_out(world.lease(16, worker="dying"))
    assert world.buffer.reap("math").requeued == 16
    turns = []
    while leases := world.lease(100):
        turns.append(len(leases))
        assert world.lease(100, suspects_held=len(leases), idle=False) == (), "no more while it holds its share"
        assert set(world.put(leases)) == {PutOutcome.COMPLETED}
    assert turns == [4, 4, 3, 3, 2]
    world.check()


def test_leases_whose_replies_are_lost_quarantine_nobody(world: World) -> None:
    world.start(math={"max_deaths": 2, "max_tries": 2}).admit(1)
    for _ in range(4):
        # the reply never arrives; the retry with the same nonce does only after the lease has run out
        _, (group_id, *_) = world.buffer.call_task("lease", "math", "worker", "nonce", 1, 0, 1, 0, 1)
        keys = task_keys(world.buffer.run, "math")
        world.buffer.client.delete(f"{keys.clock.removesuffix('clock')}grant:nonce")
        world.buffer.client.zadd(keys.status(Status.RUNNING), {group_id: 1})
        set_clock(world.buffer, "math", reaped_ms=world.buffer.server_ms(), hold_until_ms=0)
        assert world.buffer.reap("math") == (1, 0, False)
    group = world.buffer.inspect("math", group_id)
    assert (group["deaths"], group["tries"], group["status"]) == ("0", "0", "pending")
    (lease,) = world.lease(1)
    assert not lease.suspect
    world.check()


def test_leases_end_in_time_although_the_servers_clock_was_set_back(world: World) -> None:
    world.start(math={"lease_s": 60}).admit(1)
    (lease,) = world.lease(1)
    keys = task_keys(world.buffer.run, "math")
    an_hour_ahead = world.buffer.server_ms() + 3_600_000
    world.buffer.client.zadd(keys.status(Status.RUNNING), {str(lease.group_id): an_hour_ahead})
    set_clock(world.buffer, "math", reaped_ms=an_hour_ahead, hold_until_ms=an_hour_ahead)
    assert world.buffer.reap("math") == (0, 0, False)
    client: Any = world.buffer.client
    assert client.zscore(keys.status(Status.RUNNING), lease.group_id) <= world.buffer.server_ms() + 60_000
    assert world.buffer.renew([lease]).gone == []
    world.run_out([lease])
    assert world.buffer.reap("math") == (1, 0, False)


def test_only_a_death_alone_quarantines(world: World) -> None:
    world.start(math={"max_deaths": 2}).admit(2)
    killer = 1
    for _ in range(2):  # the killer takes an innocent along, then dies alone
        leases = world.lease(2)
        assert killer in {lease.group_id for lease in leases}
        world.run_out(leases)
        world.buffer.reap("math")
    assert world.statuses() == {"pending": 1, "failed": 1}
    assert "quarantined: 2 workers died with it" in world.buffer.inspect("math", killer)["error"]
    (innocent,) = world.lease(2)
    assert world.put([innocent]) == [PutOutcome.COMPLETED]
    world.check()


@pytest.mark.parametrize(
    ("letters", "minimum", "filed"),
    [
        ("cc", None, PutOutcome.COMPLETED),
        ("ca", None, PutOutcome.ABORTED),
        ("cp", None, PutOutcome.ABORTED),
        ("cf", None, PutOutcome.FAILED),
        ("cf", 1, PutOutcome.COMPLETED),
        ("fa", 1, PutOutcome.ABORTED),
        ("ff", 1, PutOutcome.FAILED),
    ],
)
def test_a_groups_status_follows_from_its_samples(
    world: World, letters: str, minimum: int | None, filed: PutOutcome
) -> None:
    world.start(math={"min_valid_samples": minimum}).admit(1)
    (lease,) = world.lease(1)
    samples = tuple(EMPTY_SAMPLE if letter == "p" else make_sample(0, status=letter) for letter in letters)
    assert world.buffer.put([GroupResult(lease, samples)]) == [filed]
    world.check()


def test_a_filtered_group_is_kept_apart(world: World) -> None:
    world.start().admit(1)
    (lease,) = world.lease(1)
    sample = make_sample(0)
    assert world.buffer.put([GroupResult(lease, (sample, sample), filtered=True)]) == [PutOutcome.FILTERED]
    assert world.statuses() == {"filtered": 1}
    assert world.buffer.counts("math").progress["reward_sum"] == 2
    world.check()


def test_an_invalid_group_fails_with_the_reason_and_harms_no_other(world: World) -> None:
    world.start().admit(2)
    bad, good = world.lease(2)
    nan = make_sample(0, reward=float("nan"))
    fine = make_sample(0)
    outcomes = world.buffer.put([GroupResult(bad, (fine, nan)), GroupResult(good, (fine, fine))])
    assert outcomes == [PutOutcome.FAILED, PutOutcome.COMPLETED]
    assert "sample 1: reward is nan" in world.buffer.inspect("math", bad.group_id)["error"]
    world.check()


def test_samples_that_are_done_survive_an_interruption(world: World) -> None:
    world.start(math={"partial_rollout": True}).admit(1)
    (lease,) = world.lease(1)
    world.buffer.put([GroupResult(lease, (make_sample(0), make_sample(0, status="a", tokens=2)))])
    assert world.buffer.recycle("math", epoch=1, target=10, limit=5) == 1
    (again,) = world.lease(1)
    assert [sample.status for sample in again.samples] == [SampleStatus.COMPLETED, SampleStatus.ABORTED]
    assert again.samples[1].response_tokens == 2
    done = (again.samples[0], make_sample(0, tokens=4))
    assert world.buffer.put([GroupResult(again, done)]) == [PutOutcome.COMPLETED]
    progress = world.buffer.counts("math").progress
    assert progress["tokens"] == 3 + 2 + 2, "only new tokens count"
    world.check()


def test_a_kept_sample_that_cannot_be_read_is_generated_again(world: World) -> None:
    world.start(math={"partial_rollout": True}).admit(1)
    world.put(world.lease(1), status="a")
    world.buffer.client.hset(task_keys(world.buffer.run, "math").rollout(1), "0", b"bytes that are no frame")
    world.buffer.recycle("math", epoch=1, target=9, limit=9)
    (lease,) = world.lease(1)
    assert [sample.status for sample in lease.samples] == [SampleStatus.PENDING, SampleStatus.ABORTED]


def test_an_invalid_result_does_not_take_back_tokens_that_were_counted(world: World) -> None:
    world.start(math={"partial_rollout": True}).admit(1)
    world.put(world.lease(1), status="a")
    counted = world.buffer.counts("math").progress["tokens"]
    world.buffer.recycle("math", epoch=1, target=9, limit=9)
    (lease,) = world.lease(1)
    bad = replace(make_sample(0), reward=float("nan"))
    assert world.buffer.put([GroupResult(lease, (bad, bad))]) == [PutOutcome.FAILED]
    assert world.buffer.counts("math").progress["tokens"] == counted > 0


@pytest.mark.parametrize("changes", [{"sampling": None}, {"reward_parts": None}, {"tools": None}, {"extra": None}])
def test_a_sample_of_the_wrong_types_fails_its_group_and_no_other(world: World, changes: dict[str, Any]) -> None:
    world.start().admit(2)
    first, second = world.lease(2)
    bad, good = replace(make_sample(0), **changes), make_sample(0)
    results = [GroupResult(first, (bad, good)), GroupResult(second, (good, good))]
    assert world.buffer.put(results) == [PutOutcome.FAILED, PutOutcome.COMPLETED]
    (field,) = changes
    assert f"{field} is None" in world.buffer.inspect("math", first.group_id)["error"]


def test_without_partial_rollout_interrupted_samples_start_again(world: World) -> None:
    world.start().admit(1)
    (lease,) = world.lease(1)
    world.buffer.put([GroupResult(lease, (make_sample(0), make_sample(0, status="a", tokens=2)))])
    world.buffer.recycle("math", epoch=1, target=10, limit=5)
    world.check()
    (again,) = world.lease(1)
    assert [sample.status for sample in again.samples] == [SampleStatus.COMPLETED, SampleStatus.PENDING]


def test_a_sample_that_failed_keeps_its_error_in_the_group(world: World) -> None:
    world.start().admit(1)
    (lease,) = world.lease(1)
    failed = Sample(
        segments=(),
        status=SampleStatus.FAILED,
        failure=FailureKind.GRADER,
        error="judge 'math' raised ZeroDivisionError",
    )
    assert world.buffer.put([GroupResult(lease, (make_sample(0), failed))]) == [PutOutcome.FAILED]
    assert world.buffer.inspect("math", 1)["error"] == "judge 'math' raised ZeroDivisionError"


def test_a_worker_report_is_shown_and_forgotten(world: World) -> None:
    world.start()
    world.buffer.report_worker("w1", {"version": 3})
    assert world.buffer.workers()["w1"]["version"] == 3
    world.buffer.forget_worker("w1")
    assert world.buffer.workers() == {}
