"""Several workers of one run: how they share what is under way."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.orders import Order
from rollq.buffer.tickets import open_queue
from rollq.buffer.values.rollouts import Status
from rollq.workers.groups import fair_share
from rollq.workers.run import Worker
from support.waiting import PATIENCE_S
from support.worker_run import Script, WorkerWorld

Scene = Callable[[WorkerWorld, Sequence[Worker], Script], Awaitable[None]]


@asynccontextmanager
async def working(world: WorkerWorld, script: Script, **settings: Any) -> AsyncIterator[Worker]:
    """A worker with connections of its own. What it holds at the end is handed back."""
    queue = open_queue(world.url, world.buffer.run)
    with Buffer.connect(world.url, world.buffer.run) as buffer:
        worker = Worker(buffer, queue, world.tasks, world.settings(script, **{"grace_s": 0, **settings}), 7)
        serving = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.rq.request_shutdown()
            await asyncio.wait_for(serving, PATIENCE_S)
            queue.connection.close()


def play(world: WorkerWorld, scene: Scene, *each: dict[str, Any]) -> None:
    """Play a scene with a worker for each of the settings, once all of them know of each other."""

    async def run() -> None:
        script = Script()
        async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
            workers = [await stack.enter_async_context(working(world, script, **settings)) for settings in each]
            await world.until(lambda: knows(workers, len(workers)))
            await scene(world, workers, script)

    asyncio.run(run())


def knows(workers: Sequence[Worker], count: int) -> bool:
    """Whether these workers know of a fleet of so many workers."""
    return all(worker.fleet.fleet.workers == count for worker in workers)


async def until_held(world: WorkerWorld, workers: Sequence[Worker], groups: int) -> None:
    """Until these workers hold so many groups. A lease counts as running before its worker has the reply."""
    await world.until(lambda: sum(len(worker.table) for worker in workers) == groups)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that leave to others for as long as it takes what is not their share."""
    monkeypatch.setattr(fair_share, "PATIENCE_S", 600.0)


@pytest.fixture
def world(buffer: Buffer, server_url: str) -> WorkerWorld:
    return WorkerWorld(buffer, server_url)


@pytest.mark.usefixtures("patient")
def test_with_nothing_set_workers_share_the_groups_equally(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        world.admit(16)
        await until_held(world, workers, 16)
        assert [len(worker.table) for worker in workers] == [4, 4, 4, 4]
        await world.until(lambda: script.running == 32)  # every sample has its place

    play(world, scene, *[{}] * 4)


@pytest.mark.usefixtures("patient")
def test_workers_share_in_proportion_to_their_places_until_their_speeds_are_known(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        world.admit(16)
        await until_held(world, workers, 16)
        assert [len(worker.table) for worker in workers] == [12, 4]

    play(world, scene, {"samples_in_flight": 300}, {"samples_in_flight": 100})


@pytest.mark.usefixtures("patient")
def test_large_tickets_are_shared_too(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        world.admit(16, groups_per_job=16)
        await until_held(world, workers, 16)
        assert [len(worker.table) for worker in workers] == [4, 4, 4, 4]

    play(world, scene, *[{}] * 4)


@pytest.mark.usefixtures("patient")
def test_a_paused_worker_leaves_its_share_to_the_others(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        paused, *others = workers
        world.buffer.order_worker(paused.rq.name, Order.PAUSE)
        await world.until(lambda: paused.control.paused and knows(others, 2))
        world.admit(16)
        await until_held(world, workers, 16)
        assert [len(worker.table) for worker in workers] == [0, 8, 8]

    play(world, scene, *[{}] * 3)


@pytest.mark.usefixtures("patient")
def test_a_worker_that_joins_gets_its_share_of_what_comes_next(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        world.admit(8)
        await until_held(world, workers, 8)
        async with working(world, script) as joined:
            await world.until(lambda: knows([*workers, joined], 3))
            world.admit(4)
            await until_held(world, [*workers, joined], 12)
            assert [len(worker.table) for worker in (*workers, joined)] == [4, 4, 4]

    play(world, scene, *[{}] * 2)


@pytest.mark.usefixtures("patient")
def test_a_worker_with_all_places_taken_leaves_the_rest_in_the_buffer_for_others(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        world.admit(8)
        await until_held(world, workers, 4)  # of 2 samples each, in 2 places: one at a time, and one that waits
        async with working(world, script) as joined:
            await until_held(world, [*workers, joined], 8)
            assert len(joined.table) == 4

    play(world, scene, *[{"samples_in_flight": 2}] * 4)


def test_surplus_tickets_are_used_up(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        tickets = world.tickets(5)
        await world.until(lambda: world.queue.count == 0)
        await world.until(lambda: set(tickets) <= set(world.queue.finished_job_registry.get_job_ids()))
        assert len(world.queue.finished_job_registry.get_job_ids()) == len(tickets)

    play(world, scene, *[{}] * 3)


@pytest.mark.usefixtures("patient")
def test_a_worker_that_was_told_to_stop_leaves_its_share_while_it_finishes(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        stopping, *others = workers
        world.admit(3)
        await until_held(world, workers, 3)
        stopping.rq.request_shutdown()
        await world.until(lambda: knows(others, 2))
        script.gate.set()
        await world.until_count(Status.COMPLETED, 3)

    play(world, scene, *[{"grace_s": PATIENCE_S}] * 3)


def test_what_a_dead_worker_should_take_is_taken_by_the_others(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        stuck = workers[0]
        stuck.intake.stopped = True  # it reports, and takes nothing
        world.admit(16)
        world.tickets(1)  # it has taken one to wait for
        await until_held(world, workers, 16)
        assert len(stuck.table) <= 1  # one whose ticket it was waiting for

    play(world, scene, *[{}] * 3)
