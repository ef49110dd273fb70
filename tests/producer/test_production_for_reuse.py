"""Production for groups that are trained several times, against a buffer that serves batches."""

from collections.abc import Iterator

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.batch_sizes import groups_at
from rollq.buffer.values.memory_use import Fullness
from rollq.producer.producer import task_state
from rollq.producer.settings import ProducerSettings
from rollq.producer.strategy import plan_production
from support.any_server import AnyServer
from support.buffer_run import World

STEPS, BATCH = 40, 8


@pytest.fixture
def world(any_server: AnyServer, run_name: str) -> Iterator[World]:
    with Buffer.connect(any_server.url, run_name) as buffer:
        yield World(buffer)


def produce(world: World) -> int:
    """Complete as many groups as the plan allows now; returns their number."""
    counts = world.buffer.counts("math")
    plan = plan_production(ProducerSettings(), counts.clock.rules, task_state(counts), Fullness())
    if plan.room > 0:
        world.complete(plan.room)
    return max(0, plan.room)


def generated(world: World, **rules: object) -> float:
    """Groups that were generated for each one that a batch of `STEPS` steps took. Each batch is complete."""
    world.start(math={"batch_groups": BATCH, **rules})
    made = 0
    for step in range(1, STEPS + 1):
        made += produce(world)
        size = groups_at(BATCH, world.buffer.clock("math").rules.schedule, step)
        assert len(world.claim(step, math=size).groups) == size
        if step % int(str(rules.get("sync_weights_interval", 1))) == 0:
            world.buffer.publish(world.held, step, uri=f"file:///weights/{step}", digest=f"digest-{step}")
        world.buffer.commit(world.held, step)
        world.buffer.expire("math")
    world.check()
    return made / (STEPS * BATCH)


@pytest.mark.parametrize("order", ["staleness", "arrival", "newest", "uniform", "priority"])
def test_fewer_groups_are_generated_where_each_is_trained_four_times(world: World, order: str) -> None:
    assert generated(world, order=order, max_staleness=8, max_uses=4) < 0.5


@pytest.mark.parametrize("cooldown", [0, 1, 2, 3, 5])
@pytest.mark.parametrize(("staleness", "interval"), [(0, 1), (1, 1), (2, 1), (3, 1), (1, 3), (2, 2)])
def test_no_batch_waits_for_groups_that_are_never_generated(
    world: World, cooldown: int, staleness: int, interval: int
) -> None:
    rules = {"max_staleness": staleness, "sync_weights_interval": interval, "reuse_cooldown_steps": cooldown}
    assert generated(world, order="uniform", max_uses=9, **rules) <= 1 + staleness


@pytest.mark.parametrize("order", ["newest", "uniform"])
@pytest.mark.parametrize("staleness", [3, 7])
@pytest.mark.parametrize(("first", "size"), [(11, 1), (7, 2), (9, 20)])
def test_no_batch_of_another_size_waits_for_groups_that_cool_down(
    world: World, order: str, staleness: int, first: int, size: int
) -> None:
    rules = {"max_staleness": staleness, "max_uses": 9, "reuse_cooldown_steps": 3, "schedule": [(first, size)]}
    generated(world, order=order, **rules)
