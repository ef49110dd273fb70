"""What the functions decide at their bounds, group by group: too little or too much by one is noticed here."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from redis.client import PubSub

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.put_args import RESULT_ARGS
from rollq.buffer.calls.replies.claims import Shortfall
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.errors import FencedError, HistoryGone, StaleWorker
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.scores import ARRIVALS
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import GroupResult, Prompt, Status
from support.buffer_run import World, make_sample, set_clock
from support.waiting import PATIENCE_S


@pytest.fixture
def world(buffer: Buffer) -> World:
    return World(buffer)


def client_of(world: World) -> Any:
    return world.buffer.client


def scores(world: World, name: str) -> dict[int, float]:
    """Members and scores of one of the task's sorted sets."""
    key = task_keys(world.buffer.run, "math").clock.removesuffix("clock") + name
    return {int(member): score for member, score in client_of(world).zrange(key, 0, -1, withscores=True)}


def server_ms(world: World) -> int:
    seconds, microseconds = client_of(world).time()
    return int(seconds) * 1000 + int(microseconds) // 1000


def put_letters(world: World, letters: str, *, version: int = 0, filtered: bool = False, **sample: Any) -> PutOutcome:
    """Lease one group and put samples with these letters."""
    (lease,) = world.lease(1)
    samples = tuple(make_sample(version, status=letter, **sample) for letter in letters)
    (outcome,) = world.buffer.put([GroupResult(lease, samples, filtered=filtered)])
    return outcome


def recycle(world: World, *, target: int = 1000, limit: int = 1000, epoch: int = 1, **given: Any) -> int:
    return world.buffer.recycle("math", epoch=epoch, target=target, limit=limit, **given)


def kill_holders(world: World) -> None:
    """Let every lease run out, while nobody is away."""
    now = server_ms(world)
    running = task_keys(world.buffer.run, "math").status(Status.RUNNING)
    for group_id in client_of(world).zrange(running, 0, -1):
        client_of(world).zadd(running, {group_id: now - 1})
    set_clock(world.buffer, "math", reaped_ms=now, hold_until_ms=0)


# -- wake-ups -------------------------------------------------------------------------------------------------------


def interrupted(world: World) -> None:
    world.admit(1)
    assert put_letters(world, "ca") is PutOutcome.ABORTED


def claimed(world: World) -> None:
    world.complete(2)
    world.claim(1)


def expired(world: World) -> None:
    world.complete(1)
    world.buffer.publish(world.held, 5, uri="", digest="5")


WAKEUPS: dict[str, tuple[Callable[[World], Any], Callable[[World], Any], list[str]]] = {
    "admit": (lambda world: None, lambda world: world.admit(1), ["admit"]),
    "admit nothing": (lambda world: None, lambda world: world.admit(1, target=0), []),
    "lease": (lambda world: world.admit(1), lambda world: world.lease(1), []),
    "put one completed": (lambda world: world.admit(1), lambda world: world.put(world.lease(1)), ["completed"]),
    "put two completed": (lambda world: world.admit(2), lambda world: world.put(world.lease(2)), ["completed"]),
    "put one interrupted": (lambda world: world.admit(1), lambda world: put_letters(world, "ca"), ["put"]),
    "hand back": (lambda world: world.admit(1), lambda world: world.buffer.hand_back(world.lease(1)), ["admit"]),
    "recycle": (interrupted, recycle, ["admit"]),
    "recycle nothing": (lambda world: None, recycle, []),
    "expire": (expired, lambda world: world.buffer.expire("math"), ["expire"]),
    "expire nothing": (lambda world: world.complete(1), lambda world: world.buffer.expire("math"), []),
    "claim": (lambda world: world.complete(2), lambda world: world.claim(1), ["claim"]),
    "claim again": (
        claimed,
        lambda world: world.claim(1),
        [],
    ),
    "release": (
        claimed,
        lambda world: world.buffer.release(world.held, 1, "return", claim_round=0),
        ["release"],
    ),
}


@pytest.mark.parametrize(("before", "act", "kinds"), WAKEUPS.values(), ids=WAKEUPS)
def test_who_waits_is_woken_by_what_changes_something(
    world: World, before: Callable[[World], Any], act: Callable[[World], Any], kinds: list[str]
) -> None:
    world.start()
    before(world)
    pubsub: PubSub = client_of(world).pubsub()
    with pubsub:
        channel = f"{world.buffer.keys.events}:"
        pubsub.psubscribe(f"{channel}*")
        pubsub.get_message(timeout=10)
        act(world)
        client_of(world).publish(f"{channel}end", "")
        heard: list[str] = []
        while not heard or heard[-1] != "end":
            message = pubsub.get_message(timeout=10)
            assert message is not None
            heard.append(message["channel"].decode().removeprefix(channel))
            assert heard[-1] == "end" or message["data"] == task_keys(world.buffer.run, "math").prefix.encode()
    assert heard == [*kinds, "end"]


def test_a_reaped_group_wakes_workers_and_an_early_look_wakes_nobody(world: World) -> None:
    world.start().admit(1)
    world.lease(1)
    with world.buffer.events() as events:
        set_clock(world.buffer, "math", reaped_ms=server_ms(world), hold_until_ms=0)
        assert world.buffer.reap("math") == (0, 0, False)
        assert not events.wait(0.05)
        kill_holders(world)
        assert world.buffer.reap("math") == (1, 0, False)
        assert events.wait(PATIENCE_S)


# -- admit ----------------------------------------------------------------------------------------------------------


def test_the_target_is_reached_and_not_passed(world: World) -> None:
    world.start()
    assert world.admit(3, target=2) == 2
    assert world.admit(3, target=2) == 0
    assert world.admit(3, target=3) == 1
    assert sorted(scores(world, "pending")) == [1, 2, 3]


def test_every_status_on_the_way_to_the_trainer_counts_against_the_target(world: World) -> None:
    world.start(math={"batch_groups": 1})
    world.complete(2)
    world.claim(1, math=1)
    world.admit(2)
    world.lease(1)
    assert world.statuses() == {"claimed": 1, "completed": 1, "running": 1, "pending": 1}
    assert world.admit(9, target=4) == 0
    assert world.admit(9, target=5) == 1


def test_a_row_is_kept_where_it_is_known(world: World) -> None:
    world.start().admit(1)
    clock = task_keys(world.buffer.run, "math").clock
    world.buffer.call("admit", clock, world.buffer.incarnation, 1, 1, 9, 1, 2, 7, b"{}", 3, "", b"{}")
    assert world.buffer.inspect("math", 2)["row"] == "7"
    assert "row" not in world.buffer.inspect("math", 3)


def test_a_new_group_has_every_sample_pending(world: World) -> None:
    world.start(math={"group_size": 3}).admit(1)
    group = world.buffer.inspect("math", 1)
    assert {name: group[name] for name in ("letters", "attempt", "tries", "deaths", "eval", "step")} == {
        "letters": "ppp", "attempt": "0", "tries": "0", "deaths": "0", "eval": "0", "step": "1",
    }  # fmt: skip
    assert abs(int(group["admitted_ms"]) - server_ms(world)) < 60_000
    assert scores(world, "pending") == {1: 2 * ARRIVALS + 1}


# -- recycle --------------------------------------------------------------------------------------------------------


def pools(world: World) -> None:
    """Three groups that were interrupted, and two that are too old."""
    world.start(math={"max_staleness": 0})
    world.complete(2)
    world.buffer.publish(world.held, 1, uri="", digest="1")
    assert world.buffer.expire("math") == 2
    world.admit(3)
    for _ in range(3):
        put_letters(world, "ca", version=1)
    assert world.statuses() == {"expired": 2, "aborted": 3}


def test_pools_are_drawn_on_in_the_order_given(world: World) -> None:
    pools(world)
    assert recycle(world, limit=1) == 1
    assert world.statuses() == {"pending": 1, "expired": 2, "aborted": 2}
    assert recycle(world, limit=3) == 3
    assert world.statuses() == {"pending": 4, "expired": 1}
    assert recycle(world) == 1
    world.check()


def test_the_oldest_groups_of_a_pool_go_first(world: World) -> None:
    pools(world)
    assert recycle(world, limit=2, statuses=[Status.EXPIRED, Status.ABORTED]) == 2
    assert sorted(scores(world, "pending")) == [1, 2]
    assert recycle(world, limit=1) == 1
    assert sorted(scores(world, "pending")) == [1, 2, 3]


def test_recycling_leaves_the_target_room_for_what_is_scheduled(world: World) -> None:
    pools(world)
    world.admit(2)
    assert recycle(world, target=2) == 0
    assert recycle(world, target=4) == 2
    assert world.statuses() == {"pending": 4, "expired": 2, "aborted": 1}


@pytest.mark.parametrize("reason", ["epoch", "control", "sleep"])
def test_nothing_is_recycled_for_an_old_epoch_or_a_paused_or_sleeping_task(world: World, reason: str) -> None:
    pools(world)
    if reason == "control":
        world.buffer.set_control("math", Control.PAUSE)
    if reason == "sleep":
        world.buffer.sleep(world.held, "weights")
    assert recycle(world, epoch=2 if reason == "epoch" else 1) == 0
    assert world.statuses() == {"expired": 2, "aborted": 3}


@pytest.mark.parametrize(("partial", "left"), [(False, "pcpcp"), (True, "acaca")])
def test_only_interrupted_samples_start_again_without_partial_rollout(world: World, partial: bool, left: str) -> None:
    world.start(math={"group_size": 5, "partial_rollout": partial}).admit(1)
    put_letters(world, "acaca")
    assert recycle(world) == 1
    assert world.buffer.inspect("math", 1)["letters"] == left
    assert world.buffer.inspect("math", 1)["tries"] == "0"
    world.check()


# -- reap -----------------------------------------------------------------------------------------------------------


def test_only_leases_that_ran_out_are_reaped(world: World) -> None:
    world.start().admit(2)
    world.lease(1)
    kill_holders(world)
    world.lease(1)
    assert world.buffer.reap("math") == (1, 0, False)
    assert world.statuses() == {"running": 1, "pending": 1}
    assert world.buffer.reap("math") == (0, 0, False)
    world.check()


@pytest.mark.parametrize(("lease_s", "silent_ms", "held"), [(30, 9_000, False), (30, 11_000, True),
                                                          (3, 2_000, False), (3, 4_000, True)])  # fmt: skip
def test_a_silence_of_a_third_of_a_lease_holds_every_verdict_for_a_lease(
    world: World, lease_s: float, silent_ms: int, held: bool
) -> None:
    world.start(math={"lease_s": lease_s}).admit(1)
    world.lease(1)
    kill_holders(world)
    now = server_ms(world)
    set_clock(world.buffer, "math", reaped_ms=now - silent_ms)
    assert world.buffer.reap("math").held is held
    clock = client_of(world).hmget(task_keys(world.buffer.run, "math").clock, "reaped_ms", "hold_until_ms")
    assert int(clock[0]) >= now
    assert int(clock[1]) >= now + lease_s * 1000 if held else int(clock[1]) == 0
    assert world.statuses() == ({"running": 1} if held else {"pending": 1})


def test_while_verdicts_are_held_nobody_dies(world: World) -> None:
    world.start().admit(1)
    world.lease(1)
    kill_holders(world)
    set_clock(world.buffer, "math", hold_until_ms=server_ms(world) + 30_000)
    assert world.buffer.reap("math") == (0, 0, True)
    set_clock(world.buffer, "math", hold_until_ms=server_ms(world) - 1)
    assert world.buffer.reap("math") == (1, 0, False)


def test_deaths_are_counted_up_to_the_last_try(world: World) -> None:
    world.start(math={"max_deaths": 3}).admit(1)
    for deaths in (1, 2):
        world.lease(1)
        kill_holders(world)
        assert world.buffer.reap("math") == (1, 0, False)
        assert scores(world, "suspects") == {1: deaths}
        assert world.buffer.inspect("math", 1)["deaths"] == str(deaths)
    (alone,) = world.lease(1, worker="last")
    assert alone.alone
    kill_holders(world)
    assert world.buffer.reap("math") == (0, 1, False)
    group = world.buffer.inspect("math", 1)
    assert group["error"] == "quarantined: 3 workers died with it, the last (last) while it ran alone"
    assert group["deaths"] == "3"
    assert not {"nonce", "worker", "alone"} & set(group)
    progress = world.buffer.counts("math").progress
    assert (progress["requeued"], progress["failed"]) == (2, 1)
    world.check()


# -- expire ---------------------------------------------------------------------------------------------------------


SWEPT = ("completed", "aborted")


def test_a_sweep_takes_no_more_than_its_limit_and_says_whether_to_call_again(world: World) -> None:
    world.start()
    world.complete(3)
    world.buffer.publish(world.held, 5, uri="", digest="5")
    assert world.buffer.call_task("expire", "math", 2, 0, *SWEPT) == [2, 0, 1, 0]
    assert world.buffer.call_task("expire", "math", 2, 0, *SWEPT) == [1, 0, 0, 0]
    assert world.buffer.call_task("expire", "math", 2, 0, *SWEPT) == [0, 0, 0, 0]
    assert world.buffer.counts("math").progress["expired"] == 3
    assert scores(world, "expired") == {1: 1, 2: 2, 3: 3}
    world.check()


def test_what_expires_loses_its_reward_and_its_stale_samples(world: World) -> None:
    world.start(math={"max_staleness": 0}).admit(1)
    world.buffer.publish(world.held, 1, uri="", digest="1")
    (lease,) = world.lease(1)
    world.buffer.put([GroupResult(lease, (make_sample(1), make_sample(1, status="a")))])
    world.buffer.publish(world.held, 2, uri="", digest="2")
    assert world.buffer.call_task("expire", "math", 9, 0, *SWEPT) == [1, 0, 0, 0]
    group = world.buffer.inspect("math", 1)
    assert group["letters"] == "pp"
    assert "reward" not in group
    world.check()


# -- put ------------------------------------------------------------------------------------------------------------


def test_a_result_leaves_no_trace_of_its_lease(world: World) -> None:
    world.start().admit(1)
    (lease,) = world.lease(1)
    world.put([lease])
    group = world.buffer.inspect("math", 1)
    assert not {"nonce", "worker", "alone"} & set(group)
    assert group["put_nonce"] == lease.nonce
    assert (group["newest"], group["oldest"], group["tokens"], group["reward"]) == ("0", "0", "6", "1.0")
    assert abs(int(group["put_ms"]) - server_ms(world)) < 60_000


def test_a_finished_group_is_no_longer_suspect_and_an_interrupted_one_still_is(world: World) -> None:
    world.start().admit(2)
    world.lease(2)
    kill_holders(world)
    world.buffer.reap("math")
    assert put_letters(world, "cc") is PutOutcome.COMPLETED
    assert put_letters(world, "ca") is PutOutcome.ABORTED
    assert [world.buffer.inspect("math", group_id)["deaths"] for group_id in (1, 2)] == ["0", "1"]
    recycle(world)
    assert scores(world, "suspects") == {2: 1}


def test_what_was_produced_is_summed_by_where_it_went(world: World) -> None:
    world.start(math={"pass_reward": 0.5}).admit(5)
    world.buffer.take_production("math")
    put_letters(world, "cc", reward=0.5)
    put_letters(world, "cc", reward=0.25, filtered=True)
    put_letters(world, "ca")
    put_letters(world, "cf")
    late = world.lease(1)
    world.buffer.publish(world.held, 9, uri="", digest="9")
    assert world.put(late, version=0) == [PutOutcome.EXPIRED]
    produced = world.buffer.take_production("math")
    assert produced.sums == {
        "completed": 1, "filtered": 1, "aborted": 1, "failed": 1, "expired": 1,
        "tokens": 30, "reward_sum": 4.5, "reward_count": 7,
    }  # fmt: skip
    assert len(produced.timings_ms) == 4
    progress = world.buffer.counts("math").progress
    assert {name: progress[name] for name in ("produced", "tokens", "reward_sum", "reward_count")} == {
        "produced": 5, "tokens": 30, "reward_sum": 4.5, "reward_count": 7,
    }  # fmt: skip
    counts = world.buffer.counts("math")
    assert (counts.outcomes, counts.kept) == (3, 1)


def test_refused_and_repeated_results_are_counted_and_change_nothing(world: World) -> None:
    world.start().admit(2)
    first, second = world.lease(2)
    assert world.put([first, first]) == [PutOutcome.COMPLETED, PutOutcome.DUPLICATE]
    world.buffer.hand_back([second])
    assert world.put([first, second]) == [PutOutcome.DUPLICATE, PutOutcome.REFUSED]
    progress = world.buffer.counts("math").progress
    assert (progress["duplicates"], progress["refused"], progress["produced"]) == (2, 1, 1)
    world.check()


def test_results_of_one_call_are_filed_each_by_its_own_samples(world: World) -> None:
    world.start(math={"group_size": 2, "max_staleness": 1}).admit(5)
    world.buffer.publish(world.held, 2, uri="", digest="2")
    leases = world.lease(5)
    letters_and_version = [("cc", 2), ("ca", 2), ("cf", 2), ("cc", 0), ("cc", 1)]
    results = [
        GroupResult(lease, tuple(make_sample(version, status=letter) for letter in letters))
        for lease, (letters, version) in zip(leases, letters_and_version, strict=True)
    ]
    assert world.buffer.put(results) == ["completed", "aborted", "failed", "expired", "completed"]
    assert scores(world, "completed") == {1: 2 * ARRIVALS + 1, 5: ARRIVALS + 5}
    assert scores(world, "by_version") == {1: 2 * ARRIVALS + 1, 2: 2 * ARRIVALS + 2, 5: ARRIVALS + 5}
    assert scores(world, "expired") == {4: 4}
    world.check()


def test_an_interruption_is_counted_and_a_finish_is_not(world: World) -> None:
    world.start().admit(1)
    for interruptions in ("1", "2"):
        put_letters(world, "ca")
        assert world.buffer.inspect("math", 1)["interruptions"] == interruptions
        recycle(world)
    put_letters(world, "cc")
    assert world.buffer.inspect("math", 1)["interruptions"] == "2"


@pytest.mark.parametrize("min_valid", [1, 2, 3])
@pytest.mark.parametrize("failed", [0, 1, 2, 3])
def test_a_group_needs_its_minimum_of_valid_samples(world: World, min_valid: int, failed: int) -> None:
    world.start(math={"group_size": 3, "min_valid_samples": min_valid}).admit(1)
    outcome = put_letters(world, "f" * failed + "c" * (3 - failed))
    assert outcome is (PutOutcome.COMPLETED if 3 - failed >= min_valid else PutOutcome.FAILED)


# -- claim, release, plan -------------------------------------------------------------------------------------------


def test_a_batch_is_claimed_as_soon_as_it_is_full_and_not_before(world: World) -> None:
    world.start()
    world.complete(1)
    shortfall = world.buffer.claim(world.held, 1, {"math": 2})
    assert isinstance(shortfall, Shortfall)
    assert (shortfall.ready, shortfall.wanted) == ({"math": 1}, {"math": 2})
    world.complete(1)
    assert [group.group_id for group in world.claim(1).groups] == [1, 2]
    assert scores(world, "claimed") == {1: 1, 2: 1}
    assert scores(world, "by_version") == {}


def test_the_trainer_hears_all_numbers_of_a_claimed_group(world: World) -> None:
    world.start(math={"batch_groups": 1}).admit(1)
    put_letters(world, "cc", reward=0.5)
    (group,) = world.claim(1, math=1).groups
    assert (group.group_id, group.oldest_version, group.arrival, group.tries) == (1, 0, 1, 1)
    assert (group.tokens, group.reward, group.shaped) == (6, 0.5, None)


def test_the_clock_remembers_the_last_claimed_step(world: World) -> None:
    world.start(math={"batch_groups": 1, "max_staleness": 3})
    world.complete(3)
    world.claim(1, math=1)
    world.claim(2, math=1)
    assert world.buffer.clock("math").claimed_step == 2
    world.buffer.release(world.held, 1, "return", claim_round=0)
    assert world.buffer.clock("math").claimed_step == 2, "the batch of step 2 is still there"
    world.buffer.release(world.held, 2, "return", claim_round=0)
    assert world.buffer.clock("math").claimed_step == 1


@pytest.mark.parametrize(("mode", "status"), [("return", "completed"), ("drop", None), ("quarantine", "failed")])
def test_bad_groups_of_a_released_batch_fail_in_any_mode(world: World, mode: Any, status: str | None) -> None:
    world.start()
    world.complete(2)
    world.claim(1)
    assert world.buffer.release(world.held, 1, mode, bad={"math": [2]}, claim_round=0) == 2
    assert world.buffer.inspect("math", 1).get("status") == status
    assert world.buffer.inspect("math", 2)["error"] == "quarantined by the trainer at step 1"
    assert world.buffer.release(world.held, 1, mode, claim_round=0) == 0
    world.check()


def test_a_committed_step_cannot_be_released(world: World) -> None:
    world.start()
    world.complete(2)
    world.train(1)
    with pytest.raises(FencedError, match="step 1 is committed"):
        world.buffer.release(world.held, 1, "return", claim_round=0)


def test_only_batches_of_the_round_or_earlier_are_undone(world: World) -> None:
    world.start()
    world.complete(2)
    fence = (world.held.epoch, world.held.nonce, 1)
    assert claim_raw(world, 1, 2, claim_round=3)[0] == b"batch"
    assert world.buffer.call_task("release", "math", *fence, "return", 2) == 0
    assert claim_raw(world, 1, 2, claim_round=1)[0] == b"batch", "an earlier round changes nothing"
    assert world.buffer.call_task("release", "math", *fence, "return", 2) == 0
    assert world.buffer.call_task("release", "math", *fence, "return", 3) == 2
    assert claim_raw(world, 1, 2, claim_round=3)[0] == b"given_up", "a claim of that round that arrives late"
    assert claim_raw(world, 1, 2, claim_round=4)[0] == b"batch"
    assert world.buffer.call_task("release", "math", *fence, "return", 3) == 0, "a late copy of the release"
    assert world.buffer.call_task("release", "math", *fence, "return", 4) == 2


def test_one_of_delivering_and_undoing_succeeds(world: World) -> None:
    world.start()

    def plan(step: int, action: str, seen: int, sizes: str = "{}") -> list[Any]:
        fence = (world.buffer.incarnation, world.held.epoch, world.held.nonce)
        reply: list[Any] = world.buffer.call("plan", world.buffer.keys.info, *fence, step, sizes, action, seen)
        assert reply.pop() == [], "it is not divided"
        return reply

    assert plan(1, "look", 0, "first") == [b"first", 0, 0, 0]
    assert plan(1, "undo", 0, "second") == [b"first", 0, 1, 0]
    assert plan(1, "deliver", 0) == [b"first", 0, 1, 0], "what was undone is not delivered"
    assert plan(1, "undo", 0) == [b"first", 0, 1, 0], "an undo of an old round begins no other one"
    assert plan(1, "deliver", 1) == [b"first", 1, 1, 0]
    assert plan(1, "undo", 1) == [b"first", 1, 1, 0], "what was delivered is not undone"
    assert plan(1, "deliver", 1) == [b"first", 1, 1, 0]


# -- lease ----------------------------------------------------------------------------------------------------------


def test_a_lease_is_recorded_with_its_holder_and_its_deadline(world: World) -> None:
    world.start(math={"lease_s": 60}).admit(1)
    before = server_ms(world)
    (lease,) = world.lease(1, worker="mine")
    assert (lease.attempt, lease.tries, lease.step, lease.suspect, lease.alone) == (1, 1, 1, False, False)
    group = world.buffer.inspect("math", 1)
    assert (group["worker"], group["nonce"], group["alone"]) == ("mine", lease.nonce, "0")
    assert list(scores(world, "generating").values()) == [0]
    assert before + 60_000 <= scores(world, "running")[1] <= server_ms(world) + 60_000
    world.buffer.hand_back([lease])
    (again,) = world.lease(1)
    assert (again.attempt, again.tries) == (2, 1)


def test_no_more_groups_are_leased_than_asked_for(world: World) -> None:
    world.start().admit(3)
    assert [lease.group_id for lease in world.lease(2)] == [1, 2]
    assert [lease.group_id for lease in world.lease(2)] == [3]


def test_a_retried_call_returns_only_what_its_nonce_still_holds(world: World) -> None:
    world.start().admit(2)
    call = ("lease", "math", "w", "nonce", 1, 0, 2, 0, 1)
    first = world.buffer.call_task(*call)
    kill_holders(world)
    world.buffer.reap("math")
    assert len(first) == 3
    assert world.buffer.call_task(*call) == [0]


def test_weights_are_refused_at_the_step_for_which_they_are_too_old(world: World) -> None:
    world.start(math={"max_staleness": 1}).admit(1)
    world.buffer.publish(world.held, 1, uri="", digest="1")
    assert len(world.lease(1, version=0)) == 1
    world.buffer.publish(world.held, 2, uri="", digest="2")
    with pytest.raises(StaleWorker, match="version 0 would be too old at step 3"):
        world.lease(1, version=0)


def test_old_weights_take_groups_up_to_the_last_step_they_are_young_enough_for(world: World) -> None:
    world.start(math={"max_staleness": 1})
    for step in (1, 2, 3):
        set_clock(world.buffer, "math", step=step)
        world.admit(1)
    set_clock(world.buffer, "math", step=1, version=1)
    assert [lease.step for lease in world.lease(9, version=0)] == [1, 2]
    assert [lease.step for lease in world.lease(9, version=1)] == [3]


@pytest.mark.parametrize(("differs", "counts_as"), [(False, 7), (True, 0)])
def test_weights_of_a_dead_epoch_count_by_its_floor_once_others_were_published(
    world: World, differs: bool, counts_as: int
) -> None:
    """Until then they may be published again: a batch does not wait for their groups as for the oldest ones."""
    world.start(math={"max_staleness": 1}).admit(1)
    world.complete(2)
    world.train(1)
    world.begin(0, mode="return", launch_id="launch-2")
    if differs:
        world.buffer.publish(world.held, 1, uri="u", digest="other weights")
    ask = ("lease", "math", "w")
    assert len(world.buffer.call_task(*ask, "a", 1, 7, 1, 0, 1)) == 2
    assert list(scores(world, "generating").values()) == [counts_as]


@pytest.mark.parametrize(("suspects", "held", "leased"), [(4, 0, 2), (5, 0, 3), (4, 1, 2), (9, 3, 1), (4, 2, 1)])
def test_a_worker_holds_the_square_root_of_all_suspects(world: World, suspects: int, held: int, leased: int) -> None:
    world.start(math={"max_deaths": 9}).admit(suspects)
    world.lease(suspects)
    kill_holders(world)
    assert world.buffer.reap("math").requeued == suspects
    assert len(world.lease(9, suspects_held=held, idle=held == 0)) == leased


def test_no_more_suspects_are_leased_than_asked_for_and_others_fill_the_rest(world: World) -> None:
    world.start(math={"max_deaths": 9}).admit(9)
    world.lease(9)
    kill_holders(world)
    world.buffer.reap("math")
    world.admit(2)
    assert [lease.suspect for lease in world.lease(2)] == [True, True]
    assert sorted(lease.suspect for lease in world.lease(5)) == [False, False, True, True, True]
    world.check()


def test_a_drain_is_asked_of_one_worker_until_its_time_is_over(world: World) -> None:
    world.start(math={"max_deaths": 2, "lease_s": 1}).admit(1)
    world.lease(1)
    kill_holders(world)
    world.buffer.reap("math")

    def drains(worker: str, held: int = 0) -> bool:
        return world.buffer.lease(
            ["math"], 1, worker=worker, version=0, epoch=1, idle=False, suspects_held=held
        ).drain  # fmt: skip

    assert not drains("busy", held=1), "a worker that holds suspects is not asked"
    before = server_ms(world)
    assert drains("first")
    assert not drains("second")
    assert drains("first")
    until_ms = int(world.buffer.inspect("math", 1)["reserved_until_ms"])
    assert before + 10_000 <= until_ms <= server_ms(world) + 10_000
    client_of(world).hset(
        task_keys(world.buffer.run, "math").group(1), "reserved_until_ms", server_ms(world) - 1
    )  # fmt: skip
    assert drains("second")


# -- what counts ----------------------------------------------------------------------------------------------------


def test_stale_groups_that_are_not_swept_yet_are_not_ready_in_order_of_arrival(world: World) -> None:
    world.start(math={"order": "arrival"})
    assert world.buffer.readiness("math", 1) == (0, 0, 0)
    world.complete(1)
    world.buffer.publish(world.held, 5, uri="", digest="5")
    assert world.buffer.readiness("math", 6) == (0, 0, 0)
    world.complete(1)
    assert world.buffer.readiness("math", 6) == (1, 0, 0)


def test_a_group_in_generation_that_is_too_old_already_is_not_waited_for(world: World) -> None:
    world.start(math={"max_staleness": 1, "stragglers": "wait"}).admit(1)
    world.lease(1)
    assert [world.buffer.readiness("math", step)[1] for step in (1, 2, 3, 4)] == [0, 1, 0, 0]


def test_work_that_nobody_died_with_is_no_suspect(world: World) -> None:
    world.start().admit(1)
    world.buffer.hand_back(world.lease(1))
    assert scores(world, "suspects") == {}


def gathering(world: World) -> str:
    """A batch of three groups that are gathered."""
    world.start()
    handle = world.buffer.open_batch("math", "batch", "train", step=1).handle
    prompts = [Prompt(f"prompt {i}") for i in range(3)]
    assert world.buffer.fill_batch("math", handle, 0, prompts, last=True) == 3
    return handle


def test_a_batch_counts_its_groups_by_where_they_went(world: World) -> None:
    handle = gathering(world)
    assert put_letters(world, "cc") is PutOutcome.GATHERED
    assert put_letters(world, "cf") is PutOutcome.FAILED
    assert put_letters(world, "cc", filtered=True) is PutOutcome.FILTERED
    state = world.buffer.batch_by_handle("math", handle)
    assert (state.gathered, state.failed, state.filtered, state.complete) == (1, 1, 1, True)


def test_samples_that_fail_are_counted_once_by_the_part_that_failed(world: World) -> None:
    world.start(math={"min_valid_samples": 1}).admit(3)
    parts = (FailureKind.GRADER, FailureKind.SANDBOX)
    both = tuple(replace(make_sample(0, status="f"), failure=kind) for kind in parts)
    (lease,) = world.lease(1)
    half = GroupResult(lease, (both[0], make_sample(0, status="a")))
    assert world.buffer.put([half, half]) == [PutOutcome.ABORTED, PutOutcome.DUPLICATE]
    assert world.buffer.counts("math").failed_samples == {"grader": 1}
    recycle(world)
    leases = world.lease(3)
    (again,) = (given for given in leases if given.group_id == lease.group_id)
    others = [given for given in leases if given is not again]
    results = [GroupResult(again, (again.samples[0], both[1]))]
    assert world.buffer.put([*results, *(GroupResult(given, both) for given in others)]) == [PutOutcome.FAILED] * 3
    assert list(world.buffer.counts("math").failed_samples.items()) == [("grader", 3), ("sandbox", 3)]


def test_a_kind_of_failure_that_is_not_known_is_refused(world: World) -> None:
    world.start().admit(1)
    (lease,) = world.lease(1)
    numbers: dict[str, Any] = dict.fromkeys(RESULT_ARGS, 0) | {
        "id": lease.group_id, "attempt": 1, "nonce": lease.nonce, "letters": "ff", "versions": "-,-",
        "token_versions": "-,-", "oldest": "-", "newest": "-", "rows": "", "unjudged": "", "error_text": "",
        "counted_in": 1, "failures": "grader,weather", "samples": "[]",
    }  # fmt: skip
    with pytest.raises(Exception, match="an argument is 'weather', and must be one of prompt, provider, context, grad"):
        world.buffer.call_task("put", "math", world.held.epoch, "0:0", *numbers.values())
    assert world.buffer.counts("math").failed_samples == {}


def test_a_group_that_leaves_its_batch_without_a_result_has_no_versions(world: World) -> None:
    handle = gathering(world)
    assert world.buffer.begin_finalize("math", handle, "nonce", lease_s=9).state == "finalizing"
    world.buffer.end_finalize("math", handle, "nonce", b"{}", {})
    assert world.statuses() == {"aborted": 3}
    assert world.buffer.inspect("math", 1)["versions"] == "-,-"


def test_samples_that_start_again_do_not_make_a_group_old(world: World) -> None:
    world.start(math={"max_staleness": 9}).admit(1)
    world.buffer.publish(world.held, 2, uri="", digest="2")
    (lease,) = world.lease(1)
    world.buffer.put([GroupResult(lease, (make_sample(1), make_sample(0, status="a")))])
    recycle(world)
    world.lease(1)
    assert scores(world, "generating") == {1: 1}


def test_after_a_rewind_masked_tokens_are_older_by_what_their_mask_allows_less(world: World) -> None:
    world.start(math={"max_staleness": 2, "max_token_staleness": 0})
    world.buffer.publish(world.held, 3, uri="", digest="3")
    world.complete(1)
    assert world.buffer.inspect("math", 1)["versions"] == "1,1"
    world.begin(0, launch_id="launch-2")
    group = world.buffer.inspect("math", 1)
    assert (group["versions"], group["oldest"]) == ("-2,-2", "-2")
    assert scores(world, "by_version") == {1: -2 * ARRIVALS + 1}


def test_only_the_latest_timings_are_kept(world: World) -> None:
    world.start().admit(1)
    timings = task_keys(world.buffer.run, "math").clock.removesuffix("clock") + "timings"
    client_of(world).rpush(timings, *[1] * 1200)
    world.put(world.lease(1))
    assert len(world.buffer.take_production("math").timings_ms) == 1000


def test_a_group_of_an_evaluation_that_starts_again_keeps_nothing(world: World) -> None:
    world.start(math={}, held_out={"kind": "eval"})
    handle = world.buffer.open_batch("held_out", "0", "eval", step=0).handle
    world.buffer.fill_batch("held_out", handle, 0, [Prompt("question")], last=True)
    assert world.put(world.lease(1, "held_out"), status="a") == [PutOutcome.RESTARTED]
    group = world.buffer.inspect("held_out", 1)
    assert (group["letters"], group["versions"], group["tries"]) == ("pp", "-,-", "0")
    world.check()


def test_flags_of_a_lease_are_0_or_1(world: World) -> None:
    world.start(math={"tail_batch_max_tries": 1}).admit(1)
    put_letters(world, "ca")
    recycle(world)
    world.lease(1)
    kill_holders(world)
    world.buffer.reap("math")
    _, (group_id, attempt, tries, step, evaluation, suspect, alone, _, _, letters, _, must_finish, _, parts, *_) = (
        world.buffer.call_task("lease", "math", "w", "nonce", 1, 0, 1, 0, 1)
    )
    assert (group_id, attempt, tries, step, letters) == (1, 3, 1, 1, b"cp")
    assert (evaluation, suspect, alone, must_finish, parts) == (0, 1, 0, 1, 0)


def claim_raw(world: World, step: int, want: int, claim_round: int = 0) -> list[Any]:
    reply: list[Any] = world.buffer.call_task(
        "claim", "math", world.held.epoch, world.held.nonce, step, want, claim_round, 0, want, 0, 0, 0, 0
    )
    return reply


def test_a_claim_of_a_later_round_takes_the_batch_over(world: World) -> None:
    world.start()
    world.complete(2)
    fence = (world.held.epoch, world.held.nonce, 1)
    assert claim_raw(world, 1, 2, 1)[0] == b"batch"
    assert world.buffer.call_task("release", "math", *fence, "return", 0) == 0
    assert claim_raw(world, 1, 2, 3)[0] == b"batch"
    assert world.buffer.call_task("release", "math", *fence, "return", 2) == 0
    assert world.statuses() == {"claimed": 2}


def test_what_a_pipeline_gave_a_group_is_served_with_it(world: World) -> None:
    world.start()
    world.complete(2)
    client_of(world).hset(task_keys(world.buffer.run, "math").group(1), "shaped", '{"rewards":[1,2],"advantages":null}')
    assert [group.shaped and group.shaped.rewards for group in world.claim(1).groups] == [(1, 2), None]


def test_one_stale_group_in_front_is_swept_first_and_passed_over_while_the_buffer_is_saved(world: World) -> None:
    world.start(math={"order": "arrival"})
    world.complete(1)
    world.buffer.publish(world.held, 5, uri="", digest="5")
    world.complete(3)
    assert claim_raw(world, 6, 2) == [b"sweep", 0, 0, 0]
    set_clock(world.buffer, "math", saving_until_ms=server_ms(world) + 60_000, saving_ms=60_000)
    assert [group[0] for group in claim_raw(world, 6, 2)[9:]] == [2, 3]
    assert world.statuses() == {"completed": 2, "claimed": 2}


def test_a_batch_of_one_waits_for_a_straggler_and_an_empty_one_does_not(world: World) -> None:
    world.start(math={"max_staleness": 1, "stragglers": "wait"})
    world.complete(1)
    world.admit(1)
    world.lease(1)
    world.buffer.publish(world.held, 1, uri="", digest="1")
    assert claim_raw(world, 2, 1) == [b"short", 1, 1, 0]
    assert claim_raw(world, 2, 0)[0] == b"batch"


def test_a_committed_step_whose_batch_is_not_kept_cannot_be_claimed_again(world: World) -> None:
    world.start(math={"resume": "fresh"})
    world.complete(2)
    world.train(1)
    with pytest.raises(HistoryGone, match="step 1 was committed"):
        claim_raw(world, 1, 0)


def rewind(world: World, step: int, mode: str) -> int:
    return int(world.buffer.call_task("rewind", "math", world.held.epoch, world.held.nonce, step, mode))


def test_regenerating_leaves_nothing_of_a_trained_group_but_its_prompt(world: World) -> None:
    world.start()
    world.complete(2)
    world.train(1)
    client_of(world).hset(
        task_keys(world.buffer.run, "math").group(1), mapping={"clone": 99, "uses": 1, "shaped": "{}"}
    )
    world.begin(0, mode="regenerate", launch_id="launch-2")
    group = world.buffer.inspect("math", 1)
    assert (group["letters"], group["tries"]) == ("pp", "0")
    assert not {"clone", "uses", "shaped"} & set(group)
    assert sorted(scores(world, "pending")) == [1, 2]
    assert scores(world, "suspects") == {}
    assert world.buffer.clock("math").claimed_step == 0
    world.check()


def test_only_steps_between_the_checkpoint_and_the_last_claim_are_rewound(world: World) -> None:
    world.start(math={"batch_groups": 1, "max_staleness": 3})
    world.complete(2)
    world.train(1, math=1)
    world.begin(1, launch_id="launch-2")
    world.claim(2, math=1)
    assert [rewind(world, step, "return") for step in (1, 2, 3)] == [0, 0, 0]
    assert world.statuses() == {"archived": 1, "claimed": 1}
    assert world.buffer.clock("math").claimed_step == 2


def test_a_death_in_company_never_spends_the_last_try(world: World) -> None:
    world.start(math={"max_deaths": 3}).admit(1)
    world.lease(1)
    client_of(world).hset(task_keys(world.buffer.run, "math").group(1), "deaths", 2)
    kill_holders(world)
    assert world.buffer.call_task("reap", "math", 9, "") == [1, 0, 0]
    assert scores(world, "suspects") == {1: 2}
    set_clock(world.buffer, "math", reaped_ms=0)
    assert world.buffer.call_task("reap", "math", 9, "") == [0, 0, 1]


def test_a_worker_with_its_share_of_suspects_gets_other_groups_and_need_not_drain(world: World) -> None:
    world.start(math={"max_deaths": 9}).admit(4)
    world.lease(4)
    kill_holders(world)
    world.buffer.reap("math")
    world.admit(3)
    reply = world.buffer.call_task("lease", "math", "w", "nonce", 1, 0, 1, 3, 0)
    assert reply[0] == 0
    assert [fields[0] for fields in reply[1:]] == [5]


def test_a_single_group_is_returned_again_to_the_call_that_leased_it(world: World) -> None:
    world.start().admit(2)
    call = ("lease", "math", "w", "nonce", 1, 0, 1, 0, 1)
    assert world.buffer.call_task(*call) == world.buffer.call_task(*call)
    assert world.statuses() == {"running": 1, "pending": 1}


def test_a_paused_task_leases_nothing_and_asks_nobody_to_drain(world: World) -> None:
    world.start().admit(1)
    world.buffer.set_control("math", Control.PAUSE)
    assert world.buffer.call_task("lease", "math", "w", "nonce", 1, 0, 1, 0, 1) == [0]
