"""Workers that make samples of each other's groups."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.errors import ServerRefused
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.tickets import open_queue
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, Lease, Prompt, Sample, Status
from rollq.workers.engines.speed import EngineSpeed
from rollq.workers.groups import lender, loans
from rollq.workers.groups.borrower import Borrower
from rollq.workers.groups.fleet_share import FleetShare
from rollq.workers.groups.leases import HeldLease
from rollq.workers.groups.recipes import Recipe
from rollq.workers.groups.sample_maker import SampleMaker, made_tokens
from rollq.workers.run import Worker
from support.buffer_run import make_sample
from support.waiting import PATIENCE_S
from support.worker_run import Script, ScriptedEngine, WorkerWorld

from .test_fleet import knows, play


@pytest.fixture
def world(buffer: Buffer, server_url: str) -> WorkerWorld:
    return WorkerWorld(buffer, server_url, {"group_size": 8, "max_tokens": 2000, "partial_rollout": True})


def taken(workers: Sequence[Worker]) -> list[int]:
    return [worker.places.taken for worker in workers]


def test_samples_that_wait_for_a_place_are_made_by_workers_with_nothing_to_do(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        world.admit(1)
        await world.until(lambda: sorted(taken(workers)) == [4, 4])
        assert sorted(len(worker.table) for worker in workers) == [1, 1]
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)
        await world.until(lambda: all(worker.table.idle for worker in workers))
        assert world.buffer.counts("math").progress["lent"] == 4

    play(world, scene, *[{"samples_in_flight": 4}] * 2)
    ((_, samples),) = world.results(1)
    made_by = [sample.extra["worker"] for sample in samples]
    assert sorted(made_by.count(worker) for worker in set(made_by)) == [4, 4]
    assert {sample.text for sample in samples} == {"42"}
    assert all(sample.reward is not None for sample in samples)
    world.world.check()


def test_a_worker_that_stops_gives_its_loans_back_with_their_tokens(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        world.admit(1)
        await world.until(lambda: sorted(taken(workers)) == [4, 4])
        scripts.append(script)
        script.abort_after = 1
        (borrower,) = [worker for worker in workers if borrows(worker)]
        (holder,) = [worker for worker in workers if not borrows(worker)]
        borrower.rq.request_shutdown()
        await world.until(lambda: borrower.table.idle)
        await world.until(lambda: holder.places.open == 8)
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)

    scripts: list[Script] = []
    play(world, scene, *[{"samples_in_flight": 4}] * 2)
    ((_, samples),) = world.results(1)
    assert len({sample.extra["worker"] for sample in samples}) == 1
    assert {sample.text for sample in samples} == {"42"}
    continued = [request for request in scripts[0].requests if request.prefix_ids is not None]
    assert len(continued) == 4
    world.world.check()


def borrows(worker: Worker) -> bool:
    return any(held.lease.borrowed for held in worker.table)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that borrow nothing, and soon take back what they offer."""

    async def nothing(_: Borrower) -> bool:
        return False

    monkeypatch.setattr(Borrower, "_borrow", nothing)
    monkeypatch.setattr(loans, "OFFER_S", 0.1)


@pytest.mark.usefixtures("alone")
def test_samples_that_nobody_takes_are_made_where_their_group_is(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        world.admit(1)
        await world.until(lambda: sum(worker.places.open for worker in workers) == 4)
        await world.until(lambda: sum(worker.places.open for worker in workers) == 8)
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)

    play(world, scene, *[{"samples_in_flight": 4}] * 2)
    ((_, samples),) = world.results(1)
    assert len({sample.extra["worker"] for sample in samples}) == 1
    world.world.check()


def test_few_groups_are_spread_before_they_start(world: WorkerWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampleMaker, "mean_sample_s", 30.0)
    monkeypatch.setattr(FleetShare, "gain", 0.0)
    monkeypatch.setattr(EngineSpeed, "gain", lambda *_: 0.0)

    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        world.admit(1)
        await world.until(lambda: taken(workers) == [2, 2, 2, 2])
        assert len(script.requests) == 8, "none has been started twice"
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)

    play(world, scene, *[{}] * 4)
    world.world.check()


def test_running_samples_move_to_faster_workers_with_their_tokens(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lender, "ratio_elsewhere", lambda *_: 2.0)

    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        script.abort_after = 1
        world.admit(1)
        await world.until(lambda: sorted(taken(workers)) == [4, 4])
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)
        assert sum(request.prefix_ids is not None for request in script.requests) == 4

    play(world, scene, *[{"samples_in_flight": 8}] * 2)
    ((_, samples),) = world.results(1)
    made_by = [sample.extra["worker"] for sample in samples]
    assert sorted(made_by.count(worker) for worker in set(made_by)) == [4, 4]
    assert {sample.text for sample in samples} == {"42"}
    assert {len(sample.segments[0].response_ids) for sample in samples} == {3}
    assert world.buffer.counts("math").progress["tokens"] == 8 * 3
    world.world.check()


@pytest.mark.parametrize("rules", [{"partial_rollout": False}, {"spread": "never"}])
def test_what_cannot_be_continued_elsewhere_stays(
    buffer: Buffer, server_url: str, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lender, "ratio_elsewhere", lambda *_: 2.0)
    world = WorkerWorld(buffer, server_url, {"group_size": 8, "max_tokens": 2000, **rules})

    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        world.admit(1)
        await world.until(lambda: sorted(taken(workers)) == [0, 8])
        for worker in workers:
            await worker.fleet.refresh()
            await worker.lender.look()
        assert sorted(taken(workers)) == [0, 8]
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)

    play(world, scene, *[{"samples_in_flight": 8}] * 2)


def finish_one(worker: Worker) -> int:
    """Finish one sample of a worker; returns its index."""
    (held,) = worker.table
    request, index = next(iter(held.requests.items()))
    engine = worker.host._engine
    assert isinstance(engine, ScriptedEngine)
    engine._stops[request].set_result("finished")
    return index


def letters(world: WorkerWorld) -> str:
    return str(world.buffer.inspect("math", 1)["letters"])


def test_a_paused_group_keeps_what_other_workers_have_made_of_it(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        script.abort_after = 1
        world.admit(1)
        await world.until(lambda: sorted(taken(workers)) == [4, 4])
        (borrower,) = [worker for worker in workers if borrows(worker)]
        finished = finish_one(borrower)
        await world.until(lambda: letters(world)[finished] == "c")
        world.buffer.set_control("math", Control.PAUSE, "for the test")
        await world.until_count(Status.ABORTED, 1)
        assert letters(world)[finished] == "c"

    play(world, scene, *[{"samples_in_flight": 4, "pause": "abort"}] * 2)
    world.world.check()


def test_samples_that_cannot_be_kept_stay_where_they_are(world: WorkerWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lender, "ratio_elsewhere", lambda *_: 2.0)

    def refuse(_: object) -> Any:
        raise ServerRefused("its memory is full")

    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        script.abort_after = 1
        for worker in workers:
            monkeypatch.setattr(worker.calls.buffer, "salvage", refuse)
        world.admit(1)
        await world.until(lambda: any(request.prefix_ids is not None for request in script.requests))
        await world.until(lambda: sorted(taken(workers)) == [0, 8])
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)

    play(world, scene, *[{"samples_in_flight": 8}] * 2)
    assert world.buffer.inspect("math", 1)["attempt"] == "1"
    world.world.check()


def test_samples_that_come_back_unfinished_are_not_lent_again(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = SampleMaker.make

    async def fail(self: SampleMaker, recipe: Recipe, held: HeldLease, samples: list[Sample]) -> None:
        if held.lease.borrowed:
            raise RuntimeError("this worker cannot make it")
        await make(self, recipe, held, samples)

    monkeypatch.setattr(SampleMaker, "make", fail)

    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        world.admit(1)
        await world.until(lambda: world.buffer.counts("math").progress.get("lent") == 4)
        (holder,) = [worker for worker in workers if worker.places.taken]
        await world.until(lambda: holder.places.open == 8)
        for worker in workers:
            await worker.fleet.refresh()
            await worker.lender.look()
        assert holder.places.open == 8
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)
        assert world.buffer.counts("math").progress["lent"] == 4

    play(world, scene, *[{"samples_in_flight": 4}] * 2)
    world.world.check()


@pytest.mark.usefixtures("alone")
def test_a_task_whose_samples_nobody_wants_offers_none_for_a_while(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        world.admit(1)
        await world.until(lambda: any(worker.loans.rests("math") for worker in workers))
        (holder,) = [worker for worker in workers if worker.loans.rests("math")]
        await world.until(lambda: holder.places.open == 8)
        await holder.fleet.refresh()
        await holder.lender.look()
        assert holder.places.open == 8
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)

    play(world, scene, *[{"samples_in_flight": 4}] * 2)


def test_a_worker_that_drains_for_a_suspect_borrows_nothing(world: WorkerWorld) -> None:
    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        for worker in workers:
            worker.intake._draining = True
            assert worker.intake.may_take()
            assert not worker.intake.may_borrow

    play(world, scene, {}, {})


def test_a_worker_with_loans_ends_during_an_outage(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        world = WorkerWorld(buffer, fresh_server.url, {"group_size": 8})

        async def run() -> None:
            script, buffers = Script(), [Buffer.connect(world.url, run_name) for _ in range(2)]
            for each in buffers:
                each.wait_out_outages()
            settings = world.settings(script, samples_in_flight=4, grace_s=0.1)
            queue = open_queue(world.url, run_name)
            workers = [Worker(each, queue, world.tasks, settings, 7) for each in buffers]
            serving = [asyncio.create_task(worker.run()) for worker in workers]
            await world.until(lambda: knows(workers, 2))
            world.admit(1)
            await world.until(lambda: sorted(taken(workers)) == [4, 4])
            await asyncio.to_thread(fresh_server.stop)
            for worker in workers:
                worker.rq.request_shutdown()
            await asyncio.wait_for(asyncio.gather(*serving), PATIENCE_S)
            for each in buffers:
                each.close()
            queue.connection.close()

        asyncio.run(run())
        fresh_server.start()


def test_a_sample_that_moves_is_continued_with_other_random_numbers() -> None:
    lease = Lease(
        task="math", group_id=1, attempt=2, nonce="n", tries=1, prompt=Prompt("x"), step=1,
        samples=(make_sample(0, tokens=5, status="a"), EMPTY_SAMPLE),
    )  # fmt: skip
    assert made_tokens(lease, 0, lease.samples[0]) == 0, "an earlier attempt had another seed"
    assert made_tokens(lease, 0, make_sample(0, tokens=9, status="a")) == 4
    assert made_tokens(replace(lease, borrowed=(0,)), 0, lease.samples[0]) == 5
