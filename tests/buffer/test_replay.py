"""The state machine, move by move, on both kinds of server."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.claiming import ReleaseMode
from rollq.buffer.errors import (
    CheckpointOverdue,
    ConfigError,
    FencedError,
    HistoryGone,
    RunMismatch,
    ServerRefused,
    StaleWorker,
    StoreLost,
    TrainerHeld,
)
from rollq.buffer.replies import Claimed, PutOutcome, Shortfall
from rollq.buffer.rollouts import EMPTY_SAMPLE, GroupResult, Prompt, Sample, SampleStatus, Status
from rollq.buffer.settings import TaskRules
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.library import library_source
from rollq.buffer.store.server import EmbeddedServer
from support.buffer_run import World, make_sample
from support.power_cut import kill_synced


@pytest.fixture
def world(any_server: EmbeddedServer, run_name: str) -> Iterator[World]:
    with Buffer.connect(any_server.url, run_name) as buffer:
        yield World(buffer)


# -- admission ------------------------------------------------------------------------------------------------------


def test_admission_stops_at_the_target(world: World) -> None:
    world.start()
    assert world.admit(5, target=3) == 3
    assert world.admit(5, target=3) == 0
    assert world.buffer.counts("math").progress["cursor"] == 3
    world.check()


def test_what_was_trained_still_counts_against_the_target(world: World) -> None:
    world.start().complete(2)
    world.train(1)
    assert world.admit(5, target=3) == 1


def test_a_repeated_admission_admits_nothing_and_tells_the_cursor(world: World) -> None:
    world.start()
    prompts = [(Prompt("a"), 1), (Prompt("b"), 2)]
    first = world.buffer.admit("math", prompts, epoch=1, cursor=0, target=10, step=1)
    again = world.buffer.admit("math", prompts, epoch=1, cursor=0, target=10, step=1)
    assert (first.count, first.first_id, first.cursor) == (2, 1, 2)
    assert (again.count, again.cursor) == (0, 2)


def test_a_producer_of_an_old_epoch_admits_nothing(world: World) -> None:
    world.start()
    world.begin(0, launch_id="launch-2")
    assert world.buffer.admit("math", [(Prompt("a"), 1)], epoch=1, cursor=0, target=10, step=1).count == 0


def test_admission_is_refused_by_a_full_server_which_still_drains(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        world = World(buffer)
        world.start().complete(2)
        leases = world.lease(1) if world.admit(1) else ()
        buffer.client.config_set("maxmemory", "1mb")
        assert buffer.memory_fraction() > 1
        with pytest.raises(ServerRefused, match="memory is full"):
            world.admit(1)
        assert world.put(leases) == [PutOutcome.COMPLETED]
        world.train(1)
        buffer.checkpoint(world.held, 1)
        assert world.statuses() == {"completed": 1}
        world.check()


# -- leases ---------------------------------------------------------------------------------------------------------


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


def test_an_interruption_is_no_try(world: World) -> None:
    world.start(math={"max_tries": 2, "partial_rollout": True}).admit(1)
    for _ in range(3):
        world.put(world.lease(1), status="a")
        world.buffer.recycle("math", epoch=1, target=9, limit=9)
    world.buffer.hand_back(world.lease(1), counted=True, error="engine failed")
    assert world.statuses() == {"pending": 1}


def test_renewal_keeps_a_lease_and_names_the_lost_ones(world: World) -> None:
    world.start().admit(2)
    kept, lost = world.lease(2)
    world.buffer.hand_back([lost])
    assert world.buffer.renew([kept, lost]) == [lost]


def test_failed_groups_are_kept_for_audit_up_to_a_cap(world: World) -> None:
    world.start(math={"max_tries": 1, "audit_groups": 2}).admit(3)
    world.buffer.hand_back(world.lease(3), counted=True, error="boom")
    assert world.statuses() == {"failed": 2}
    assert world.buffer.counts("math").dropped == {"failed": 1}
    world.check()


# -- dead workers ---------------------------------------------------------------------------------------------------


def test_a_dead_workers_groups_go_to_another_and_its_late_result_is_refused(world: World) -> None:
    world.start().admit(1)
    zombie = world.lease(1, worker="zombie")
    world.run_out(zombie)
    assert world.buffer.reap("math") == (1, 0, False)
    heir = world.lease(1, worker="heir")
    assert heir[0].suspect
    assert world.put(zombie) == [PutOutcome.REFUSED]
    assert world.buffer.renew(zombie) == list(zombie)
    assert world.put(heir) == [PutOutcome.COMPLETED]
    assert world.put(zombie) == [PutOutcome.REFUSED]
    assert world.buffer.counts("math").progress["refused"] == 2
    world.check()


def test_an_outage_makes_no_suspects(world: World) -> None:
    world.start().admit(1)
    leases = world.lease(1)
    world.run_out(leases)
    world.buffer.client.hset(task_keys(world.buffer.run, "math").clock, "reaped_ms", 1)
    assert world.buffer.reap("math").held, "nobody reaped for long: everyone was away, not the worker"
    assert world.buffer.reap("math").held, "for one more lease"
    assert world.buffer.renew(leases) == []
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


# -- results --------------------------------------------------------------------------------------------------------


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


def test_without_partial_rollout_interrupted_samples_start_again(world: World) -> None:
    world.start().admit(1)
    (lease,) = world.lease(1)
    world.buffer.put([GroupResult(lease, (make_sample(0), make_sample(0, status="a", tokens=2)))])
    world.buffer.recycle("math", epoch=1, target=10, limit=5)
    world.check()
    (again,) = world.lease(1)
    assert [sample.status for sample in again.samples] == [SampleStatus.COMPLETED, SampleStatus.PENDING]


# -- staleness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_staleness", "interval", "last_valid"), [(0, 4, 8), (1, 4, 12), (0, 1, 5), (1, 1, 6)])
def test_xb06_a_version_expires_at_the_threshold(
    world: World, max_staleness: int, interval: int, last_valid: int
) -> None:
    world.start(4, math={"max_staleness": max_staleness, "sync_weights_interval": interval})
    world.complete(1)  # by version 4
    for step in range(5, last_valid + 1):
        assert world.buffer.counts("math").ready == 1, step
        assert isinstance(world.buffer.claim(world.held, last_valid, {"math": 2}), Shortfall)
        world.buffer.publish(world.held, step, uri="u", digest=str(step))
    assert world.buffer.counts("math").clock.step == last_valid + 1
    assert world.buffer.counts("math").ready == 0
    assert world.buffer.expire("math") == 1
    assert world.statuses() == {"expired": 1}
    world.check()


def test_a_stale_group_is_never_claimed_even_before_the_sweep(world: World) -> None:
    world.start(math={"max_staleness": 0})
    world.complete(2)
    world.buffer.publish(world.held, 1, uri="u", digest="1")
    assert world.statuses() == {"completed": 2}
    assert isinstance(world.buffer.claim(world.held, 2, {"math": 1}), Shortfall)


@pytest.mark.parametrize(("expiry", "kept"), [("member", [True, False]), ("group", [False, False])])
def test_xb08_expiry_resets_stale_members_or_the_whole_group(world: World, expiry: str, kept: list[bool]) -> None:
    world.start(math={"expiry": expiry, "max_staleness": 0})
    world.admit(1)
    (lease,) = world.lease(1)
    world.buffer.put([GroupResult(lease, (make_sample(1), make_sample(0)))])
    world.buffer.publish(world.held, 1, uri="u", digest="1")
    assert world.buffer.expire("math") == 1
    world.check()
    assert world.buffer.recycle("math", epoch=1, target=10, limit=5) == 1
    (again,) = world.lease(1)
    assert [sample.status is SampleStatus.COMPLETED for sample in again.samples] == kept
    assert again.prompt.content == lease.prompt.content


def test_xb07_a_result_that_comes_too_late_is_stored_as_expired(world: World) -> None:
    world.start(math={"max_staleness": 0}).admit(1)
    leases = world.lease(1)
    world.buffer.publish(world.held, 1, uri="u", digest="1")
    assert world.put(leases, version=0) == [PutOutcome.EXPIRED]
    assert world.statuses() == {"expired": 1}
    assert not world.buffer.client.exists(task_keys(world.buffer.run, "math").rollout(1))
    world.check()


def test_xb09_expired_groups_can_be_dropped_and_counted(world: World) -> None:
    world.start(math={"tail_batch_trigger_size": -1, "max_staleness": 0})
    world.complete(1)
    world.admit(1)
    leases = world.lease(1)
    world.buffer.publish(world.held, 1, uri="u", digest="1")
    assert world.put(leases, version=0) == [PutOutcome.DROPPED]
    assert world.buffer.expire("math") == 1
    assert world.statuses() == {}
    assert world.buffer.counts("math").dropped == {"expired": 2}
    world.check()


def test_xb10_aborted_groups_expire_too_unless_they_have_no_tokens(world: World) -> None:
    world.start(math={"max_staleness": 0}).admit(2)
    with_tokens, without = world.lease(2)
    world.buffer.put(
        [
            GroupResult(with_tokens, (make_sample(0, status="a"), EMPTY_SAMPLE)),
            GroupResult(without, (EMPTY_SAMPLE, EMPTY_SAMPLE)),
        ]
    )
    world.buffer.publish(world.held, 3, uri="u", digest="3")
    assert world.buffer.expire("math") == 1
    assert world.statuses() == {"aborted": 1, "expired": 1}
    world.check()


@pytest.mark.parametrize(("order", "first"), [("staleness", [2, 1]), ("fifo", [1, 2])])
def test_xb12_order_is_by_staleness_or_by_arrival(world: World, order: str, first: list[int]) -> None:
    world.start(2, math={"order": order, "max_staleness": 3}).admit(2)
    newer, older = world.lease(2)
    world.put([newer], version=2)
    world.put([older], version=1)
    assert [group.group_id for group in world.claim(3).groups] == first


def test_fifo_never_serves_a_stale_group_that_arrived_first(world: World) -> None:
    world.start(2, math={"order": "fifo", "max_staleness": 0}).admit(3)
    first, second, third = world.lease(3)
    world.put([second, third], version=2)
    world.put([first], version=2)
    world.buffer.publish(world.held, 3, uri="u", digest="3")
    world.admit(2)
    world.put(world.lease(2, version=3), version=3)
    assert [group.group_id for group in world.claim(4).groups] == [4, 5]
    world.check()


# -- batches --------------------------------------------------------------------------------------------------------


def test_a_fifo_claim_ahead_of_the_clock_waits_instead_of_sweeping_for_ever(world: World) -> None:
    world.start(math={"order": "fifo", "max_staleness": 0}).complete(4)
    world.claim(1)
    assert world.buffer.claim(world.held, 2, {"math": 2}) == Shortfall(2, {"math": 0}, {"math": 2})


def test_the_batch_of_a_step_is_the_same_for_whoever_asks_again(world: World) -> None:
    world.start().complete(5)
    claimed = world.claim(1)
    assert world.claim(1) == claimed
    assert world.buffer.claim(world.held, 1, {"math": 4}) == claimed, "the first sizes count"
    again = world.buffer.fetch(claimed.groups)
    assert [group.group_id for group in again] == [1, 2]
    assert again[0].samples[0].response_tokens == 3
    world.check()


def test_a_step_is_claimed_for_all_tasks_or_for_none(world: World) -> None:
    world.start(math={}, code={})
    world.complete(2, "math")
    short = world.buffer.claim(world.held, 1, {"math": 2, "code": 2})
    assert short == Shortfall(1, {"code": 0}, {"code": 2})
    assert world.statuses("math") == {"completed": 2}
    world.complete(2, "code")
    claimed = world.claim(1, math=2, code=2)
    assert [(group.task, group.group_id) for group in claimed.groups] == [
        ("math", 1),
        ("math", 2),
        ("code", 1),
        ("code", 2),
    ]
    world.check()


class Rank(Buffer):
    """Another rank, which takes code for ready when it is not, and lets others act before it undoes its torn claim."""

    moment: str
    meanwhile: Callable[[], None]

    def readiness(self, task: str, step: int) -> tuple[int, int]:
        return 1000, 0

    def call(self, name: str, key: str, *args: Any) -> Any:
        if name == self.moment:
            self.meanwhile()
        return super().call(name, key, *args)


@pytest.mark.parametrize("moment", ["plan", "release"], ids=["before it is undone", "while it is undone"])
def test_a_rank_that_undoes_a_torn_claim_takes_no_batch_from_another(
    moment: str, any_server: EmbeddedServer, world: World
) -> None:
    world.start(math={}, code={})
    world.complete(2, "math")
    delivered: list[Claimed] = []

    def another_rank_gets_the_whole_batch() -> None:
        if not delivered:
            world.complete(2, "code")
            delivered.append(world.claim(1, math=2, code=2))

    with Rank.connect(any_server.url, world.buffer.run) as rank:
        rank.moment, rank.meanwhile = moment, another_rank_gets_the_whole_batch
        got = rank.claim(world.held, 1, {"math": 2, "code": 2})
        assert delivered
        if isinstance(got, Shortfall):  # it saw what was true when it looked, and asks again
            got = rank.claim(world.held, 1, {"math": 2, "code": 2})
    assert [got] == delivered
    assert world.claim(1, math=2, code=2) == got
    world.check()


def test_xb02_a_task_of_size_zero_is_always_ready(world: World) -> None:
    world.start(math={}, code={})
    world.complete(1, "math")
    assert [group.task for group in world.claim(1, math=1, code=0).groups] == ["math"]
    world.buffer.commit(world.held, 1)


def test_commit_is_idempotent_and_leaves_no_gaps(world: World) -> None:
    world.start().complete(4)
    world.claim(1)
    world.claim(2)
    with pytest.raises(FencedError, match="step 2 cannot be committed: the last committed step is 0"):
        world.buffer.commit(world.held, 2)
    for step in (1, 1, 2):
        world.buffer.commit(world.held, step)
    assert world.statuses() == {"archived": 4}
    assert world.buffer.counts("math").progress["consumed"] == 4
    world.check()


@pytest.mark.parametrize(("mode", "after"), [("return", {"completed": 2}), ("drop", {}), ("quarantine", {"failed": 2})])
def test_a_batch_can_be_released(world: World, mode: str, after: dict[str, int]) -> None:
    world.start().complete(2)
    world.claim(1)
    assert world.buffer.release(world.held, 1, cast(ReleaseMode, mode)) == 2
    assert world.buffer.release(world.held, 1, cast(ReleaseMode, mode)) == 0
    assert world.statuses() == after
    world.check()
    world.complete(2)
    assert len(world.claim(1).groups) == 2


def test_a_checkpoint_drops_what_it_covers(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(6)
    for step in (1, 2, 3):
        world.train(step)
    world.buffer.checkpoint(world.held, 2)
    world.buffer.checkpoint(world.held, 2)
    assert world.statuses() == {"archived": 2}
    assert world.buffer.counts("math").dropped == {"trained": 4}
    leftovers = [
        key
        for key in world.buffer.client.scan_iter(match=f"*{world.buffer.run}*")
        if b"manifest" in key or b"plan" in key
    ]
    assert sorted(key.rsplit(b":", 2)[1:] for key in leftovers) == [
        [b"manifest", b"2"],
        [b"manifest", b"3"],
        [b"plan", b"3"],
    ]
    world.check()


def test_a_trainer_that_never_checkpoints_is_told(world: World) -> None:
    world.start(math={"max_uncheckpointed_steps": 2, "max_staleness": 5}).complete(6)
    world.train(1)
    world.train(2)
    with pytest.raises(CheckpointOverdue, match="last checkpoint is of step 0"):
        world.buffer.claim(world.held, 3, {"math": 2})
    world.buffer.checkpoint(world.held, 1)
    world.train(3)


def test_resuming_fresh_keeps_no_trained_batches(world: World) -> None:
    world.start(math={"resume": "fresh", "max_uncheckpointed_steps": 1, "max_staleness": 9}).complete(8)
    for step in (1, 2, 3):
        world.train(step)
    assert world.statuses() == {"completed": 2}
    assert world.buffer.counts("math").dropped == {"trained": 6}
    world.begin(1, launch_id="launch-2")
    assert world.statuses() == {"completed": 2}, "what was trained is gone, and its steps get other groups"
    world.train(2)
    world.check()


# -- restarts -------------------------------------------------------------------------------------------------------


def test_replay_serves_the_same_batches_again(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(6)
    before = [world.train(step) for step in (1, 2)] + [world.claim(3)]
    world.begin(0, launch_id="launch-2")
    assert world.statuses() == {"claimed": 6}
    clock = world.buffer.clock("math")
    assert (clock.epoch, clock.step, clock.version, clock.committed) == (2, 1, 0, 0)
    assert world.buffer.counts("math").progress["consumed"] == 0
    assert [world.train(step) for step in (1, 2, 3)] == before
    world.check()


def test_resuming_from_a_checkpoint_restores_its_counters(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(6)
    for step in (1, 2, 3):
        world.train(step)
    world.buffer.checkpoint(world.held, 1)
    world.begin(1, launch_id="launch-2")
    assert world.buffer.counts("math").progress["consumed"] == 2
    assert world.statuses() == {"claimed": 4}
    assert [group.group_id for group in world.train(2).groups] == [3, 4]
    world.check()


def test_the_trainers_checkpoint_wins_over_an_uncommitted_step(world: World) -> None:
    world.start().complete(4)
    world.claim(1)  # trained and checkpointed, but killed before commit
    world.begin(1, launch_id="launch-2")
    assert world.statuses() == {"archived": 2, "completed": 2}
    assert world.buffer.counts("math").progress["consumed"] == 2
    assert [group.group_id for group in world.claim(2).groups] == [3, 4]
    world.check()


def test_return_puts_the_batches_after_the_checkpoint_back(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(6)
    for step in (1, 2):
        world.train(step)
    world.claim(3)
    world.begin(1, launch_id="launch-2", mode="return")
    assert world.statuses() == {"archived": 2, "completed": 4}
    assert [group.group_id for group in world.train(2, math=4).groups] == [3, 4, 5, 6]
    world.check()


def test_regenerate_keeps_only_the_prompts(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(4)
    world.train(1)
    world.train(2)
    world.begin(1, launch_id="launch-2", mode="regenerate")
    assert world.statuses() == {"archived": 2, "pending": 2}
    leases = world.lease(2)
    assert [lease.prompt.content for lease in leases] == ["math 2", "math 3"]
    assert all(sample is EMPTY_SAMPLE for lease in leases for sample in lease.samples)
    world.check()


def test_tokens_of_dead_versions_count_as_the_checkpoints(world: World) -> None:
    world.start(math={"max_staleness": 1}).complete(2)
    for version in (1, 2, 3):
        world.buffer.publish(world.held, version, uri="u", digest=str(version))
    world.complete(1, version=3)
    world.admit(1)
    dead = world.lease(1, version=3)
    world.buffer.expire("math")
    world.begin(1, launch_id="launch-2", mode="return")
    assert world.put(dead, version=3, epoch=1) == [PutOutcome.COMPLETED]
    claimed = world.claim(2)
    assert [group.oldest_version for group in claimed.groups] == [1, 1]
    assert claimed.floors["math"][1] == 1
    world.check()


def test_a_batch_that_is_served_again_is_as_old_as_it_was(world: World) -> None:
    world.start(math={"max_staleness": 1})
    for step in (1, 2, 3):
        world.complete(2, version=step - 1)
        before = world.train(step)
    world.begin(0, launch_id="launch-2")
    for step in (1, 2, 3):
        again = world.train(step)
    assert again == before
    assert again.floors == {"math": {0: 0}}, "its tokens are not of a dead epoch, as when it was first claimed"


def test_history_that_a_checkpoint_covers_is_gone(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(4)
    world.train(1)
    world.train(2)
    world.buffer.checkpoint(world.held, 2)
    with pytest.raises(HistoryGone, match="oldest step to resume from is 2"):
        world.begin(1, launch_id="launch-2")
    live = world.buffer.live_model()
    assert live is not None
    assert live.version == 2, "a refused resume moves nothing"
    world.begin(2, launch_id="launch-3")


def test_all_ranks_of_a_launch_share_one_epoch(world: World) -> None:
    world.start()
    again = world.begin(0, launch_id="launch-1")
    assert again.epoch == 1
    assert world.begin(0, launch_id="launch-2").epoch == 2


def test_a_replaced_trainer_is_refused_everything(world: World) -> None:
    world.start().complete(4)
    old = world.held
    world.claim(1)
    world.begin(0, launch_id="launch-2")
    buffer = world.buffer
    for attempt in (
        lambda: buffer.claim(old, 1, {"math": 2}),
        lambda: buffer.commit(old, 1),
        lambda: buffer.publish(old, 1, uri="u", digest="d"),
        lambda: buffer.checkpoint(old, 0),
        lambda: buffer.release(old, 1, "return"),
        lambda: buffer.renew_trainer(old),
    ):
        with pytest.raises(FencedError):
            attempt()
    assert world.statuses() == {"claimed": 2, "completed": 2}


def test_a_second_trainer_is_told_who_holds_the_run_or_takes_over(world: World) -> None:
    world.start()
    with pytest.raises(TrainerHeld, match="trainer trainer holds the run"):
        world.begin(0, launch_id="other", trainer_id="rival")
    assert world.begin(0, launch_id="other", trainer_id="rival", takeover=True).epoch == 2


def test_a_second_trainer_that_could_not_resume_either_is_told_of_the_first(world: World) -> None:
    world.start(math={"max_staleness": 9}).complete(2)
    world.train(1)
    world.buffer.checkpoint(world.held, 1)
    with pytest.raises(TrainerHeld, match="'trainer' holds the run"):
        world.begin(0, launch_id="other", trainer_id="rival")
    with pytest.raises(HistoryGone):
        world.begin(0, launch_id="other", trainer_id="rival", takeover=True)


def test_a_published_version_never_falls_or_changes(world: World) -> None:
    world.start()
    publish = world.buffer.publish
    publish(world.held, 2, uri="u", digest="two")
    publish(world.held, 2, uri="u", digest="two")
    with pytest.raises(FencedError, match="version 1 cannot be published: 2 is live"):
        publish(world.held, 1, uri="u", digest="one")
    with pytest.raises(FencedError, match="already live with other weights"):
        publish(world.held, 2, uri="u", digest="other")
    assert world.buffer.client.get(world.buffer.keys.model_version) == b"2"


# -- the store ------------------------------------------------------------------------------------------------------


def test_a_store_that_lost_its_data_is_noticed_by_every_call(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        world = World(buffer)
        world.start().complete(2)
        world.admit(2)
        leases = world.lease(1)
        buffer.client.flushall()
        for attempt in (
            lambda: buffer.clock("math"),
            lambda: buffer.counts("math"),
            lambda: buffer.admit("math", [(Prompt("x"), 1)], epoch=1, cursor=0, target=9, step=1),
            lambda: buffer.recycle("math", epoch=1, target=9, limit=1),
            lambda: buffer.lease(["math"], 1, worker="w", version=0, epoch=1),
            lambda: buffer.renew(leases),
            lambda: buffer.hand_back(leases),
            lambda: buffer.put([GroupResult(leases[0], (make_sample(0),) * 2)]),
            lambda: buffer.reap("math"),
            lambda: buffer.expire("math"),
            lambda: buffer.claim(world.held, 1, {"math": 2}),
            lambda: buffer.commit(world.held, 1),
            lambda: buffer.publish(world.held, 1, uri="u", digest="d"),
            lambda: buffer.renew_trainer(world.held),
            lambda: buffer.report_worker("w", {}),
        ):
            with pytest.raises(StoreLost):
                attempt()
        assert buffer.client.dbsize() == 0, "nothing is created again"


def test_a_server_that_was_started_again_empty_is_store_lost(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        world = World(buffer)
        world.start()
        buffer.client.flushall()
        buffer.client.function_flush()
        for attempt in (
            lambda: buffer.counts("math"),
            lambda: buffer.lease(["math"], 1, worker="w", version=0, epoch=1),
            lambda: buffer.claim(world.held, 1, {"math": 2}),
        ):
            with pytest.raises(StoreLost):
                attempt()


def test_another_incarnation_of_the_run_is_not_mistaken_for_ours(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as ours, Buffer.connect(fresh_server.url, run_name) as theirs:
        World(ours).start()
        ours.client.flushall()
        World(theirs).start()
        with pytest.raises(StoreLost, match="another incarnation"):
            ours.counts("math")


def test_run_and_tasks_are_created_once_and_then_compared(world: World) -> None:
    buffer = world.buffer
    buffer.create_run(model="qwen", tokenizer="t1")
    buffer.create_run()
    with pytest.raises(RunMismatch, match="model fingerprint qwen, this role has llama"):
        buffer.create_run(model="llama")
    rules = TaskRules(batch_groups=4)
    buffer.register_task("math", rules)
    assert buffer.rules("math").stale_threshold == rules.stale_threshold
    with pytest.raises(RunMismatch, match="batch_groups = 4, this role has 8"):
        buffer.register_task("math", TaskRules(batch_groups=8))


def test_a_task_registered_late_joins_the_live_epoch(world: World) -> None:
    world.start()
    world.buffer.publish(world.held, 3, uri="u", digest="3")
    world.buffer.register_task("late", TaskRules(batch_groups=1, group_size=1))
    clock = world.buffer.clock("late")
    assert (clock.epoch, clock.version) == (1, 3)


@pytest.mark.parametrize("name", ["", "a:b", "{x}", "a b", "..\r\n", "x" * 65, "käse", "*"])
def test_names_that_could_break_keys_are_refused(any_server: EmbeddedServer, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        Buffer.connect(any_server.url, name)
    with Buffer.connect(any_server.url, "fine") as buffer, pytest.raises(ConfigError, match="task name"):
        buffer.clock(name)


def test_functions_of_another_build_are_not_run_silently(fresh_server: EmbeddedServer, run_name: str) -> None:
    client = Buffer.connect(fresh_server.url, run_name).client
    foreign = library_source() + "\n-- another build"
    client.function_load(foreign, replace=True)
    with pytest.raises(RunMismatch, match=f"another build of the functions.*-p {fresh_server.port} function delete"):
        Buffer.connect(fresh_server.url, run_name)
    client.close()


def test_a_full_server_lets_roles_in_as_long_as_it_has_the_functions(
    fresh_server: EmbeddedServer, run_name: str
) -> None:
    with Buffer.connect(fresh_server.url, run_name) as first:
        World(first).start()
        first.client.config_set("maxmemory", "1mb")
        with Buffer.connect(fresh_server.url, run_name) as late:
            assert late.tasks() == ["math"]
        first.client.function_flush()
        with pytest.raises(ServerRefused, match="memory is full"):
            Buffer.connect(fresh_server.url, run_name)


def test_a_worker_report_is_shown_and_forgotten(world: World) -> None:
    world.start()
    world.buffer.report_worker("w1", {"version": 3})
    assert world.buffer.workers()["w1"]["version"] == 3
    world.buffer.forget_worker("w1")
    assert world.buffer.workers() == {}


def test_all_work_survives_a_killed_server(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        world = World(buffer)
        world.start().complete(4)
        before = world.claim(1)
        kill_synced(fresh_server, buffer.client)
        fresh_server.start()
        assert world.claim(1) == before
        assert isinstance(world.train(1), Claimed)
        assert world.statuses() == {"completed": 2, "archived": 2}
        world.check()


def test_a_subscription_waits_for_a_server_that_is_away(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        buffer.create_run()
        kill_synced(fresh_server, buffer.client)
        back = threading.Timer(0.2, fresh_server.start)
        back.start()
        with buffer.events():
            assert buffer.tasks() == []
        back.join()


def test_keys_are_spelled_the_same_in_lua_and_python(world: World) -> None:
    world.start().complete(2)
    keys = task_keys(world.buffer.run, "math")
    client = world.buffer.client
    assert client.exists(keys.clock, keys.progress, keys.by_version, keys.group(1), keys.rollout(1)) == 5
    world.claim(1)
    assert client.exists(keys.manifest(1), world.buffer.keys.plan(1), keys.status(Status.CLAIMED)) == 3


def test_a_sample_that_failed_keeps_its_error_in_the_group(world: World) -> None:
    world.start().admit(1)
    (lease,) = world.lease(1)
    failed = Sample(segments=(), status=SampleStatus.FAILED, error="judge 'math' raised ZeroDivisionError")
    assert world.buffer.put([GroupResult(lease, (make_sample(0), failed))]) == [PutOutcome.FAILED]
    assert world.buffer.inspect("math", 1)["error"] == "judge 'math' raised ZeroDivisionError"
