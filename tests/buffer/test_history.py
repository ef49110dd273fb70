"""The history of a task, and what monitors show of it besides its counts."""

from dataclasses import replace

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.history import HISTORY_COUNTERS, HISTORY_ROW_MS, HISTORY_ROWS, MOST_ROW_BYTES, HistoryRow
from rollq.buffer.values.rollouts import GroupResult, Lease, Status
from support.buffer_run import World, make_sample, set_clock


@pytest.fixture
def world(buffer: Buffer) -> World:
    return World(buffer).start(math={"max_staleness": 1})


def let_pass(world: World, ms: int = HISTORY_ROW_MS) -> None:
    """Let time pass since the task was last reaped."""
    set_clock(world.buffer, "math", reaped_ms=world.buffer.server_ms() - ms)


def result_of(lease: Lease) -> GroupResult:
    return GroupResult(lease, (make_sample(0),) * len(lease.samples))


def rows(world: World) -> tuple[HistoryRow, ...]:
    return world.buffer.overview("math", HISTORY_ROWS).rows


def test_several_producers_write_one_row_for_each_ten_seconds(world: World) -> None:
    world.complete(2)
    world.admit(1)
    world.buffer.reap("math")
    for others in range(20):
        before = world.buffer.server_ms() // HISTORY_ROW_MS
        world.buffer.reap("math")
        if world.buffer.server_ms() // HISTORY_ROW_MS != before:
            break  # a new row was due meanwhile
        assert len({row.at_ms // HISTORY_ROW_MS for row in rows(world)}) == len(rows(world)), others
    last = rows(world)[-1]
    assert (last.step, last.version, last.ready) == (1, 0, 2)
    assert (last.statuses[Status.COMPLETED], last.statuses[Status.PENDING]) == (2, 1)
    assert (last.counters["admitted"], last.counters["produced"], last.counters["reward_count"]) == (3, 2, 4)


def test_a_row_is_written_for_each_period(world: World) -> None:
    for _ in range(3):
        let_pass(world)
        world.buffer.reap("math")
    assert len(rows(world)) == 3


def test_the_history_is_a_day_long_and_takes_a_bounded_number_of_bytes(world: World) -> None:
    key = task_keys(world.buffer.run, "math").prefix + "history"
    # numbers as long as those of a run of years
    widest = ",".join(["9" * 13, "9" * 7, "9" * 7, *["9" * 7] * 12, *["9" * 14] * len(HISTORY_COUNTERS)])
    world.buffer.client.rpush(key, *[widest] * 2 * HISTORY_ROWS)
    let_pass(world)
    world.buffer.reap("math")
    assert world.buffer.client.llen(key) == HISTORY_ROWS
    taken = world.buffer.client.memory_usage(key, samples=0)
    assert isinstance(taken, int)
    assert taken <= HISTORY_ROWS * MOST_ROW_BYTES


def test_the_staleness_of_trained_groups_is_added_up(world: World) -> None:
    world.complete(3)
    world.train(1, math=1)
    assert world.buffer.counts("math").progress["staleness"] == 0
    released = world.claim(2, math=2)  # a step after their weights
    world.buffer.release(world.held, 2, "return", claim_round=released.claim_round)
    assert world.buffer.counts("math").progress["staleness"] == 0
    world.train(2, math=2)
    let_pass(world)
    world.buffer.reap("math")
    assert rows(world)[-1].counters["staleness"] == 2


def test_ready_groups_are_counted_by_their_staleness(world: World) -> None:
    world.complete(3)
    world.train(1)
    world.complete(2)
    assert world.buffer.overview("math").by_staleness == {0: 2, 1: 1}
    world.train(2, math=1)  # what is left of version 0 is too old
    assert world.buffer.overview("math").by_staleness == {0: 0, 1: 2}
    assert sum(world.buffer.overview("math").by_staleness.values()) == world.buffer.counts("math").ready


@pytest.mark.parametrize("order", ["staleness", "arrival"])
def test_groups_are_counted_by_their_tokens_where_these_are_masked_by_age(buffer: Buffer, order: str) -> None:
    world = World(buffer).start(math={"max_staleness": 3, "max_token_staleness": 1, "order": order})
    world.complete(3)
    assert buffer.overview("math").by_staleness == {0: 3, 1: 0, 2: 0, 3: 0}
    world.train(1, math=1)
    world.complete(2)
    assert buffer.overview("math").by_staleness == {0: 2, 1: 2, 2: 0, 3: 0}


def test_beyond_the_last_staleness_that_is_shown_all_are_counted_together(buffer: Buffer) -> None:
    world = World(buffer).start(math={"max_staleness": 100})
    world.complete(80)
    for step in range(1, 41):
        world.train(step, math=1)
    assert buffer.overview("math").by_staleness[31] == 40


def test_groups_of_a_task_in_order_of_arrival_are_counted_too(buffer: Buffer) -> None:
    world = World(buffer).start(math={"order": "arrival"})
    world.complete(3)
    assert buffer.overview("math").by_staleness == {0: 3, 1: 0}


def test_ages_are_those_of_the_groups_that_have_waited(world: World) -> None:
    nothing = world.buffer.overview("math")
    assert (nothing.pending_age_s, nothing.running_age_s, nothing.ready_age_s) == (None, None, None)
    world.complete(1)
    world.admit(2)
    world.lease(1)
    earlier = world.buffer.server_ms() - 100_000
    keys = task_keys(world.buffer.run, "math")
    for group_id, field in ((1, "put_ms"), (2, "leased_ms"), (3, "admitted_ms")):
        assert world.buffer.client.hset(keys.group(group_id), field, str(earlier)) == 0, field
    found = world.buffer.overview("math")
    for age_s in (found.pending_age_s, found.running_age_s, found.ready_age_s):
        assert age_s is not None
        assert 100 <= age_s < 1000


def test_times_in_the_queue_and_with_a_worker_are_added_up(world: World) -> None:
    world.admit(2)
    keys = task_keys(world.buffer.run, "math")
    world.buffer.client.hset(keys.group(1), "admitted_ms", str(world.buffer.server_ms() - 100_000))
    leases = world.lease(2)
    world.buffer.hand_back(leases[1:])
    world.lease(1)  # not for the first time
    world.buffer.put([replace(result_of(leases[0]), generate_s=2.5)])
    progress = world.buffer.counts("math").progress
    assert (progress["leased"], progress["worked_ms"]) == (2, 2500)
    assert progress["queued_ms"] >= 100_000


def test_a_task_that_no_producer_has_looked_at_is_silent(world: World) -> None:
    assert world.buffer.overview("math").silent_s is None
    world.buffer.reap("math")
    silent_s = world.buffer.overview("math").silent_s
    assert silent_s is not None
    assert silent_s < 600
    let_pass(world, 3_600_000)
    silent_s = world.buffer.overview("math").silent_s
    assert silent_s is not None
    assert silent_s >= 3600
