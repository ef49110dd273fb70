"""Prompts that have more tokens than `max_prompt_tokens`: dropped at the first try, and not admitted again."""

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.values.rollouts import Prompt, Status
from rollq.workers.run import Worker
from support.worker_run import Script, WorkerWorld

LONG = "x" * 50


@pytest.fixture
def world(buffer: Buffer, server_url: str) -> WorkerWorld:
    world = WorkerWorld(buffer, server_url, {"max_prompt_tokens": 20})
    texts = ("short", LONG, "short too")
    prompts = [(Prompt(text, answer="1", row=row), row + 1) for row, text in enumerate(texts)]
    buffer.admit("math", prompts, epoch=1, cursor=0, target=100, step=1)
    world.tickets(3)
    return world


def test_a_prompt_that_is_too_long_is_dropped_at_once_and_its_row_remembered(world: WorkerWorld) -> None:
    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 2)
        await world.until(lambda: world.buffer.counts("math").dropped.get("too_long") == 1)

    world.play(scene)
    counts = world.buffer.counts("math")
    assert (counts.unaccounted, counts.failed_in_a_row, counts.outcomes) == (0, 0, 2)
    assert {status: n for status, n in counts.statuses.items() if n} == {Status.COMPLETED: 2}
    assert world.buffer.rows_too_long("math") == {1: 50}
    world.world.check()


def test_a_group_of_an_evaluation_fails_instead(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, {"max_prompt_tokens": 20})
    batch = buffer.open_batch("math", "b", "train", step=1)
    buffer.fill_batch("math", batch.handle, 0, [Prompt("short", answer="1"), Prompt(LONG)], last=True)
    world.tickets(2)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.GATHERED, 1)
        await world.until_count(Status.FAILED, 1)

    world.play(scene)
    assert buffer.batch_by_handle("math", batch.handle).complete
    assert "the prompt has 50 tokens; max_prompt_tokens is 20" in world.error(2)


def test_a_lease_that_ended_drops_nothing(world: WorkerWorld) -> None:
    buffer = world.buffer
    first, *_ = world.world.lease(1)
    assert buffer.hand_back([first]) == 1
    assert not buffer.drop_too_long(first, 50, "too long")
    assert world.count(Status.PENDING) == 3
    assert buffer.rows_too_long("math") == {}
