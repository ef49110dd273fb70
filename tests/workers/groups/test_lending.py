"""Workers that make samples of each other's groups."""

from collections.abc import Sequence
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.rollouts import Status
from rollq.workers.engines.speed import EngineSpeed
from rollq.workers.groups import lender, loans
from rollq.workers.groups.borrower import Borrower
from rollq.workers.groups.fleet_share import FleetShare
from rollq.workers.groups.samples import SampleMaker
from rollq.workers.run import Worker
from support.worker_run import Script, WorkerWorld

from .test_fleet import play


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
