"""The orders in which batches take completed groups."""

import random
from collections import Counter
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.orders import GroupOrder
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.errors import ConfigError, FencedError
from rollq.buffer.rules.settings import Order
from support.buffer_run import World, set_clock
from support.draw_model import draw, level_of

ORDERS: tuple[Order, ...] = ("staleness", "arrival", "newest", "uniform", "priority")
REPLAY = {"max_staleness": 9, "batch_groups": 4}


def ids_of(claimed: object) -> list[int]:
    assert isinstance(claimed, Claimed)
    return [group.group_id for group in claimed.groups]


def claim(world: World, step: int, count: int = 4, *, seed: int = 0) -> list[int]:
    return ids_of(world.buffer.claim(world.held, step, {"math": count}, seed=seed))


def fill(world: World, versions: list[int], **rules: object) -> World:
    """A task with one completed group for each version, in the order of their arrival."""
    world.start(math={**REPLAY, **rules})
    world.admit(len(versions))
    leases = world.lease(len(versions))
    for version in range(1, max(versions) + 1):
        world.buffer.publish(world.held, version, uri=f"file:///{version}", digest=f"digest-{version}")
    for lease, version in zip(leases, versions, strict=True):
        world.put([lease], version=version)
    return world


def test_the_newest_weights_come_first_and_of_these_the_last_arrival(world: World) -> None:
    fill(world, [2, 0, 1, 2, 1, 0], order="newest")
    assert claim(world, 1) == [4, 1, 5, 3]


def test_arrivals_come_in_their_order_whatever_their_weights(world: World) -> None:
    fill(world, [2, 0, 1, 2, 1, 0], order="arrival")
    assert claim(world, 1) == [1, 2, 3, 4]


@pytest.mark.parametrize("seed", [0, 7, -1, 2**40])
def test_a_uniform_draw_follows_from_the_seed_and_the_step(world: World, seed: int) -> None:
    fill(world, [1, 0, 2, 1, 0, 2], order="uniform")
    by_version = [(0, 2), (0, 5), (0, 1), (0, 4), (0, 3), (0, 6)]
    claimed = world.buffer.claim(world.held, 1, {"math": 4}, seed=seed)
    assert isinstance(claimed, Claimed)
    ids, probabilities = draw(by_version, 4, seed=seed, task="math", step=1)
    assert ids_of(claimed) == ids
    assert probabilities == pytest.approx([1 / 6] * 4)
    assert [group.probability for group in claimed.groups] == pytest.approx(probabilities)


def test_a_draw_by_priority_follows_from_the_seed_the_step_and_the_priorities(world: World) -> None:
    fill(world, [0] * 8, order="priority")
    priorities = {1: 5.0, 2: 0.25, 3: 1e-20, 4: 1.04, 5: 1e20, 6: 5.01}
    assert world.buffer.prioritize(world.held, "math", priorities) == 6
    bounded = {group_id: min(max(priorities.get(group_id, 1.0), 2.0**-32), 2.0**32) for group_id in range(1, 9)}
    in_set = sorted((level_of(priority), group_id) for group_id, priority in bounded.items())
    for step in (1, 2):
        claimed = world.buffer.claim(world.held, step, {"math": 4}, seed=3)
        assert isinstance(claimed, Claimed)
        ids, probabilities = draw(in_set, 4, seed=3, task="math", step=step)
        assert ids_of(claimed) == ids
        assert [group.probability for group in claimed.groups] == pytest.approx(probabilities)
        in_set = [(level, group_id) for level, group_id in in_set if group_id not in ids]
        world.buffer.commit(world.held, step)


@pytest.mark.parametrize("draws", [4000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("order", ["uniform", "priority"])
def test_draws_have_their_distribution(world: World, order: Order, draws: int) -> None:
    """Chi-squared of draws of one group, with the same seeds each time; p = 0.01 for 7 degrees of freedom is 18.5."""
    fill(world, [0] * 8, order=order)
    shares = [1.0] * 8
    if order == "priority":
        shares = [2.0**exponent for exponent in range(-3, 5)]
        world.buffer.prioritize(world.held, "math", dict(zip(range(1, 9), shares, strict=True)))
    counts = Counter(
        group.group_id for seed in range(draws) for group in world.buffer.preview(1, {"math": 1}, seed=seed)
    )
    expected = [draws * share / sum(shares) for share in shares]
    assert sum((counts[place + 1] - mean) ** 2 / mean for place, mean in enumerate(expected)) < 18.5


def train_two_steps(world: World, order: Order) -> list[list[int]]:
    """Fill a task, and train two batches of it; returns their groups."""
    fill(world, [0] * 12, order=order)
    world.buffer.prioritize(world.held, "math", {group_id: float(group_id) for group_id in range(1, 13)})
    batches = list[list[int]]()
    for step in (1, 2):
        batches.append(claim(world, step))
        world.buffer.commit(world.held, step)
    return batches


@pytest.mark.parametrize("order", ORDERS)
def test_a_restarted_trainer_gets_the_same_batch_again(world: World, order: Order) -> None:
    batches = train_two_steps(world, order)
    world.begin(0, launch_id="after a crash")
    assert [claim(world, step) for step in (1, 2)] == batches


@pytest.mark.parametrize("order", ["uniform", "priority"])
def test_a_trainer_that_gives_its_batches_back_draws_the_same_again(world: World, order: Order) -> None:
    batches = train_two_steps(world, order)
    world.begin(0, launch_id="after a crash", mode="return")
    for step in (1, 2):
        assert claim(world, step) == batches[step - 1]
        world.buffer.commit(world.held, step)


@pytest.mark.parametrize("order", ORDERS)
def test_no_order_serves_a_stale_group(world: World, order: Order) -> None:
    world.start(math={"order": order, "max_staleness": 0, "batch_groups": 4}).complete(6)
    world.buffer.publish(world.held, 1, uri="file:///1", digest="digest-1")
    world.train(1, math=2)
    world.complete(4)
    assert sorted(claim(world, 2)) == [7, 8, 9, 10]
    world.check()


def test_a_draw_while_the_buffer_is_saved_leaves_stale_groups_out(world: World) -> None:
    """Nothing expires in the meantime, so they are among the completed ones."""
    world.start(math={"order": "priority", "max_staleness": 0, "batch_groups": 2}).complete(6)
    world.buffer.prioritize(world.held, "math", dict.fromkeys(range(1, 7), 1000.0))
    world.buffer.publish(world.held, 1, uri="file:///1", digest="digest-1")
    world.train(1, math=2)
    world.complete(2)
    world.buffer.prioritize(world.held, "math", {7: 3.0, 8: 1.0})
    now_ms = world.buffer.server_ms()
    set_clock(world.buffer, "math", saving_until_ms=now_ms + 60_000, saving_ms=120_000, saver="a test")
    claimed = world.buffer.claim(world.held, 2, {"math": 2})
    assert isinstance(claimed, Claimed)
    assert sorted(ids_of(claimed)) == [7, 8]
    by_id = {group.group_id: group.probability for group in claimed.groups}
    assert by_id[7] == pytest.approx(3 * (by_id[8] or 0), rel=0.05)
    assert sum(probability or 0 for probability in by_id.values()) == pytest.approx(1)


def test_priorities_fall_with_each_use_and_stay_with_the_copy(world: World) -> None:
    fill(world, [0] * 4, order="priority", max_uses=3, priority_decay=0.25)
    claimed = claim(world, 1)
    assert world.buffer.prioritize(world.held, "math", {claimed[0]: 64.0}) == 1
    world.buffer.commit(world.held, 1)
    again = world.buffer.claim(world.held, 2, {"math": 4})
    assert isinstance(again, Claimed)
    assert {group.uses for group in again.groups} == {1}
    total = 64 * 0.25 + 3 * 0.25
    assert sorted(group.probability or 0 for group in again.groups) == pytest.approx([0.25 / total] * 3 + [16 / total])


def test_a_priority_reaches_the_copy_of_a_group_that_was_trained(world: World) -> None:
    fill(world, [0] * 4, order="priority", max_uses=2, priority_decay=1)
    first = claim(world, 1)
    world.buffer.commit(world.held, 1)
    assert world.buffer.prioritize(world.held, "math", {first[2]: 9.0}) == 1
    again = world.buffer.claim(world.held, 2, {"math": 4})
    assert isinstance(again, Claimed)
    assert max(group.probability or 0 for group in again.groups) == pytest.approx(9 / 12, rel=0.05)
    world.buffer.commit(world.held, 2)
    assert world.buffer.prioritize(world.held, "math", {first[2]: 9.0, 99: 1.0}) == 0  # no copy is left


@pytest.mark.parametrize("priority", [0.0, -1.0, float("nan"), float("inf")])
def test_a_priority_must_be_above_0_and_finite(world: World, priority: float) -> None:
    fill(world, [0] * 4, order="priority")
    with pytest.raises(ConfigError, match=r"group 2: priority .*: must be above 0 and finite"):
        world.buffer.prioritize(world.held, "math", {1: 1.0, 2: priority})


def test_a_trainer_that_was_replaced_writes_no_priorities(world: World) -> None:
    fill(world, [0] * 4, order="priority")
    before = world.held
    world.begin(0, launch_id="another")
    with pytest.raises(FencedError):
        world.buffer.prioritize(before, "math", {1: 2.0})


def test_a_group_that_is_sampled_again_loses_its_priority(world: World) -> None:
    fill(world, [0] * 2, order="priority")
    world.buffer.prioritize(world.held, "math", {1: 100.0, 2: 100.0})
    world.buffer.order_group("math", 1, GroupOrder.REQUEUE)
    world.put(world.lease(1))
    claimed = world.buffer.claim(world.held, 1, {"math": 2})
    assert isinstance(claimed, Claimed)
    by_id = {group.group_id: group.probability for group in claimed.groups}
    assert by_id == {1: pytest.approx(1 / 101, rel=0.05), 2: pytest.approx(100 / 101, rel=0.05)}


@pytest.mark.parametrize("order", ORDERS)
def test_every_group_of_every_order_is_trained_once(world: World, order: Order) -> None:
    fill(world, [random.Random(5).randrange(4) for _ in range(40)], order=order)
    taken: list[int] = []
    for step in range(1, 11):
        if order == "priority":
            world.buffer.prioritize(world.held, "math", {g: float(g % 7 + 1) for g in range(1, 41) if g not in taken})
        taken += claim(world, step)
        world.buffer.commit(world.held, step)
    assert sorted(taken) == list(range(1, 41))
    world.check()


def test_a_restored_run_draws_what_it_would_have_drawn(world: World, tmp_path: Path) -> None:
    fill(world, [0] * 12, order="priority", max_uses=2)
    world.buffer.prioritize(world.held, "math", {group_id: float(group_id) for group_id in range(1, 13)})
    claim(world, 1)
    world.buffer.commit(world.held, 1)
    world.buffer.save(tmp_path / "saved")
    with Buffer(world.buffer.servers, f"{world.buffer.run}-fork") as fork:
        fork.restore(tmp_path / "saved")
        there = World(fork)
        there.begin(1, launch_id="fork")
        assert claim(there, 2) == claim(world, 2)
