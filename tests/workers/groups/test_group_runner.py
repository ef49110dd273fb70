"""A group's way through a whole worker: real server, real RQ, an engine that says what the test tells it to."""

import asyncio
import os
import re
import shutil
import signal
import threading
import time
from socket import gethostname
from typing import Any

import pytest
from safetensors.numpy import save

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.leases import Leased, Renewed
from rollq.buffer.errors import StoreLost, WeightsError
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.tickets import open_queue
from rollq.buffer.values.rollouts import FinishReason, GroupResult, Prompt, Sample, SampleStatus, Status, VersionSpan
from rollq.buffer.weights.manifest import WEIGHTS_FILE
from rollq.buffer.weights.store import store_weights
from rollq.workers.engines.protocol import EngineDead, SwapMode, WeightsVersion
from rollq.workers.groups.task_control import WorkerState
from rollq.workers.run import Worker
from support.buffer_run import make_sample, set_clock
from support.waiting import PATIENCE_S
from support.worker_run import Script, WorkerWorld, age_leases


@pytest.fixture
def world(buffer: Buffer, server_url: str) -> WorkerWorld:
    return WorkerWorld(buffer, server_url)


def test_groups_arrive_with_all_that_the_trainer_needs(world: WorkerWorld) -> None:
    world.admit(4)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 4)

    script = world.play(scene, answer="3")
    for group_id, samples in world.results(4):
        assert len(samples) == 2
        for sample in samples:
            assert sample.status is SampleStatus.COMPLETED
            assert sample.finish_reason is FinishReason.STOP
            assert sample.text == "3"
            assert sample.reward == float(group_id == 4)  # whose prompt is number 3, with that answer
            assert str(sample.extra["worker"]).startswith(f"{gethostname()}-")
            assert sample.extra["judge"] == "exact_match"
            assert 0 <= sample.extra["judge_s"] < 60
            (segment,) = sample.segments
            assert segment.versions == (VersionSpan(1, 0, 2),)
            assert segment.response_ids.tolist() == [ord("3"), 1]
            assert segment.prompt_ids.tolist() == list(f"math {group_id - 1}".encode())
            assert sample.sampling["temperature"] == 1.0
    assert len({request.sampling.seed for request in script.requests}) == 8
    world.world.check()


def test_leases_of_many_tickets_are_taken_in_one_call(world: WorkerWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.admit(64, groups_per_job=4)
    sizes = []
    lease = Buffer.lease

    def counting(self: Buffer, *args: Any, **kwargs: Any) -> Leased:
        leased = lease(self, *args, **kwargs)
        sizes.append(len(leased.leases))
        return leased

    monkeypatch.setattr(Buffer, "lease", counting)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 64)

    world.play(scene)
    assert sizes == [4, 60]  # the first ticket shows how many groups the others may be for
    world.world.check()


def test_xp14_an_error_of_the_engine_about_one_request_fails_that_sample_with_its_words(world: WorkerWorld) -> None:
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        script.error = ValueError("prompt longer than the context")
        script.gate.set()
        await world.until_count(Status.FAILED, 1)
        script.error = None
        world.admit(1)
        await world.until_count(Status.COMPLETED, 1)

    world.play(scene)
    assert world.error(1).startswith("prompt longer than the context")
    world.world.check()


def test_the_share_of_samples_without_a_reward_is_reported_with_the_last_error(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, {"judge": "support.worker_run.own_judge"})
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: any(report["unrewarded"] for report in buffer.workers().values()))
        (report,) = buffer.workers().values()
        assert report["unrewarded"] == 1.0
        assert "RuntimeError: the judge is out" in report["judge_error"]

    world.play(scene)


def test_a_judge_that_raises_can_count_as_a_wrong_answer_and_is_counted(buffer: Buffer, server_url: str) -> None:
    judge = "support.worker_run.strict_judge"
    world = WorkerWorld(buffer, server_url, {"judge": judge, "on_judge_error": "zero"})
    world.admit(2)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 2)
        await world.until(lambda: any(report["unrewarded"] for report in buffer.workers().values()))

    world.play(scene, answer="1")
    wrong, right = (samples for _, samples in world.results(2))
    assert {tuple(sample.reward_parts.items()) for sample in right} == {(("judge_error", 0.0),)}
    for sample in wrong:
        assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 0.0)
        assert sample.reward_parts == {"judge_error": 1.0}
        assert "RuntimeError: this is not the answer" in str(sample.extra["judge_error"])


def test_a_judge_that_raises_on_the_own_answer_of_a_row_costs_no_generation(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, {"judge": "support.worker_run.own_judge"})
    world.admit(3)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.FAILED, 3)

    assert not world.play(scene).requests


def test_a_judge_that_prefers_no_answer_is_doubted_and_named(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, {"judge": "support.worker_run.cold_judge"})
    world.admit(6)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 6)
        await world.until(lambda: any(report["judge_doubt"] for report in buffer.workers().values()))
        (report,) = buffer.workers().values()
        assert (
            "gives the reference answers of the first rows no better reward than a wrong text" in report["judge_doubt"]
        )

    world.play(scene)


def test_xp14_a_judge_that_raises_fails_the_group_and_never_rewards_0(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, {"judge": "support.worker_run.own_judge"})
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.FAILED, 1)

    world.play(scene)
    judge, said = "judge 'support.worker_run.own_judge'", "RuntimeError: the judge is out"
    place = r"\(tests/support/worker_run\.py:\d+ in own_judge\)"
    given = "it was given the prompt's own answer, as the text '0': fix the row or the judge, .*"
    assert re.fullmatch(f"{re.escape(judge)}: {said} {place}; {given}", world.error(1))


def test_xp10_aborted_samples_go_on_from_their_tokens(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, {"partial_rollout": True, "max_tokens": 5, "max_staleness": 4})
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        world.publish(1)
        await world.until_count(Status.ABORTED, 1)
        script.gate.set()
        world.recycle(1)
        await world.until_count(Status.COMPLETED, 1)

    script = world.play(scene, answer="123456789", open_gate=False, swap=SwapMode.ABORT)
    assert script.swaps[-1] == (WeightsVersion(1, 1, "d1"), SwapMode.ABORT)
    again = script.requests[-1]
    assert again.prefix_ids is not None
    assert again.prefix_ids.tolist() == list(b"123")
    assert again.sampling.max_tokens == 2
    ((_, samples),) = world.results(1)
    for sample in samples:
        (segment,) = sample.segments
        assert segment.response_ids.tolist() == list(b"12345")
        assert segment.versions == (VersionSpan(1, 0, 3), VersionSpan(1, 1, 2))
        assert len(segment.logprobs) == 5
        assert sample.text == "12345"
        assert sample.finish_reason is FinishReason.LENGTH
        assert sample.sampling["max_tokens"] == 5
    world.world.check()


def test_xp10_without_partial_rollout_aborted_samples_start_again(world: WorkerWorld) -> None:
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        world.publish(1)
        await world.until_count(Status.ABORTED, 1)
        script.gate.set()
        world.recycle(1)
        await world.until_count(Status.COMPLETED, 1)

    script = world.play(scene, answer="123456789", open_gate=False, swap=SwapMode.ABORT)
    assert [request.prefix_ids for request in script.requests] == [None] * 4
    ((_, samples),) = world.results(1)
    assert samples[0].segments[0].versions == (VersionSpan(1, 1, 10),)
    world.world.check()


def test_sb05_kept_samples_are_neither_made_nor_judged_again(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, {"partial_rollout": True})
    world.admit(1)
    (lease,) = world.world.lease(1, worker="another")
    buffer.put([GroupResult(lease, (make_sample(0, reward=0.25), lease.samples[1]))])
    world.recycle(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 1)

    script = world.play(scene, answer="0")
    assert len(script.requests) == 1
    ((_, samples),) = world.results(1)
    assert samples[0].reward == 0.25
    assert samples[1].reward == 1.0
    world.world.check()


def test_engine_death_hands_the_groups_back_and_the_engine_is_started_again(world: WorkerWorld) -> None:
    world.admit(3)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 6)
        script.engines[0].die()
        await world.until(lambda: len(script.engines) == 2 and world.count(Status.PENDING) == 3)
        script.gate.set()
        world.tickets(3)
        await world.until_count(Status.COMPLETED, 3)

    script = world.play(scene, open_gate=False)
    assert [version for version, _ in script.swaps] == [WeightsVersion(1, 0, "d0")] * 2
    assert int(world.buffer.inspect("math", 1)["tries"]) == 2
    assert world.error(1) == "the engine died: the GPU fell off the bus"
    world.world.check()


def test_an_engine_that_dies_too_often_ends_the_worker(world: WorkerWorld) -> None:
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        script.engines[0].die()
        await world.until_count(Status.PENDING, 1)

    with pytest.raises(EngineDead, match="fell off the bus"):
        world.play(scene, open_gate=False, engine_restarts=0)
    world.world.check()


def test_refused_weights_leave_the_old_ones_serving(world: WorkerWorld) -> None:
    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: worker.host.published.is_set())
        script.refuse = WeightsError("3 tensors are missing")
        world.publish(1)
        await world.until(lambda: worker.follower._refused is not None)
        world.admit(1)
        await world.until_count(Status.COMPLETED, 1)
        assert worker.host.version == WeightsVersion(1, 0, "d0")
        script.refuse = None
        await world.until(lambda: worker.host.version == WeightsVersion(1, 1, "d1"))

    world.play(scene)
    ((_, samples),) = world.results(1)
    assert [span.version for segment in samples[0].segments for span in segment.versions] == [0]


def test_weights_that_cannot_be_written_leave_the_old_ones_serving(world: WorkerWorld) -> None:
    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: worker.host.published.is_set())
        folder = worker.follower._folder
        shutil.rmtree(folder)
        folder.write_text("in the way")
        stored = store_weights(world.buffer, {WEIGHTS_FILE: save({})})
        world.buffer.publish(world.world.held, 1, uri=stored.uri, digest=stored.digest)
        await world.until(lambda: worker.follower._refused is not None)
        world.admit(1)
        await world.until_count(Status.COMPLETED, 1)
        folder.unlink()
        await world.until(lambda: worker.host.version == WeightsVersion(1, 1, stored.digest))

    world.play(scene)


def test_nothing_is_leased_with_weights_that_are_too_old(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, {"max_staleness": 0})

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: worker.host.published.is_set())
        script.refuse = WeightsError("not yet")
        world.publish(1)
        await world.until(lambda: worker.follower._refused is not None)
        world.admit(1)
        await asyncio.sleep(0.5)  # long enough for a lease
        assert script.requests == []
        assert world.count(Status.PENDING) == 1
        script.refuse = None
        await world.until_count(Status.COMPLETED, 1)

    world.play(scene)
    ((_, samples),) = world.results(1)
    assert samples[0].oldest_version == 1


def test_sigterm_hands_unfinished_groups_back_without_counting_a_try(world: WorkerWorld) -> None:
    world.admit(3)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 6)
        os.kill(os.getpid(), signal.SIGTERM)
        await world.until_count(Status.PENDING, 3)

    world.play(scene, open_gate=False, grace_s=0.1)
    assert world.count(Status.RUNNING) == 0
    assert {world.buffer.inspect("math", group_id)["tries"] for group_id in (1, 2, 3)} == {"0"}
    world.world.check()


def test_results_on_their_way_at_a_forced_end_are_put_or_handed_back(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.admit(40)
    put = Buffer.put

    def slow(self: Buffer, results: Any) -> Any:
        time.sleep(0.3)
        return put(self, results)

    monkeypatch.setattr(Buffer, "put", slow)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 80)
        worker.runner._puts._limit = 4
        script.gate.set()
        await world.until(lambda: all(held.finished for held in worker.table))
        worker.rq.request_shutdown()
        worker.rq.request_shutdown()

    world.play(scene, open_gate=False)
    assert world.count(Status.RUNNING) == 0
    world.world.check()


def test_sigterm_lets_groups_in_flight_finish_within_the_grace_period(world: WorkerWorld) -> None:
    world.admit(3)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 6)
        os.kill(os.getpid(), signal.SIGTERM)
        await world.until(lambda: worker.intake.stopped)
        world.admit(1)
        script.gate.set()
        await world.until_count(Status.COMPLETED, 3)

    world.play(scene, open_gate=False)
    assert world.count(Status.PENDING) == 1
    assert world.queue.count == 1


def test_an_attempt_that_takes_too_long_is_cut_off_and_fails_when_its_tries_are_spent(
    buffer: Buffer, server_url: str
) -> None:
    world = WorkerWorld(buffer, server_url, {"max_tries": 2})
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: bool(world.error(1)))
        world.tickets(1)
        await world.until_count(Status.FAILED, 1)

    world.play(scene, open_gate=False, attempt_timeout_s=0.4)
    assert "attempt 2 was cut off" in world.error(1)
    world.world.check()


def test_a_worker_that_cannot_renew_stops_at_its_local_deadline(
    buffer: Buffer, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = WorkerWorld(buffer, server_url)
    world.admit(1)
    ended = threading.Event()

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        monkeypatch.setattr(Buffer, "renew", lambda self, leases: ended.wait() and Renewed([], []))
        age_leases(world.task.lease_s, monkeypatch)
        await world.until(lambda: script.running == 0)
        await world.until_count(Status.PENDING, 1)
        ended.set()

    world.play(scene, open_gate=False)
    assert world.buffer.inspect("math", 1)["tries"] == "0"
    world.world.check()


def test_a_lease_that_came_too_late_to_be_begun_is_handed_back(world: WorkerWorld) -> None:
    assert world.world.admit(1) == 1

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: worker.host.published.is_set())
        (lease,) = world.world.lease(1)
        worker.intake.start(lease, time.monotonic() - world.task.lease_s)
        worker.table._cut_off(time.monotonic())
        await world.until_count(Status.PENDING, 1)

    world.play(scene, open_gate=False)
    world.world.check()


def test_leases_are_renewed_while_a_group_is_slow(world: WorkerWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.admit(1)
    running = task_keys(world.buffer.run, "math").status(Status.RUNNING)

    def deadline_ms() -> float:
        return float(world.buffer.client.zscore(running, "1") or 0)

    async def renewal_at(share: float) -> None:
        before_ms = deadline_ms()
        age_leases(share * world.task.lease_s, monkeypatch)
        await world.until(lambda: deadline_ms() > before_ms)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        for share in (0.4, 0.8, 1.2):
            await renewal_at(share)
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)

    script = world.play(scene, open_gate=False)
    assert len(script.requests) == 2


def test_a_group_that_was_taken_over_is_stopped_and_nothing_of_it_is_put(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        (held,) = worker.table
        world.buffer.hand_back([held.lease])
        age_leases(world.task.lease_s / 2, monkeypatch)
        await world.until(lambda: script.running == 0 and len(worker.table) == 0)

    world.play(scene, open_gate=False)
    assert world.count(Status.PENDING) == 1
    world.world.check()


JUDGED = {"wait": False}


async def patient_judge(prompt: Prompt, sample: Sample) -> float:
    while JUDGED["wait"] and sample.sampling["seed"]:
        await asyncio.sleep(0.005)
    return 1.0


def test_groups_that_are_judged_leave_the_engine_to_some_others(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, {"judge": f"{__name__}.patient_judge"})
    world.admit(8)
    seen: set[tuple[int, int]] = set()

    async def scene(worker: Worker, script: Script) -> None:
        async def watch() -> None:
            while True:
                seen.add((worker.table.generating, len(worker.table)))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await world.until(lambda: len(worker.table) == 5 and worker.table.generating == 0)
        assert world.count(Status.PENDING) == 3
        JUDGED["wait"] = False
        await world.until_count(Status.COMPLETED, 8)
        watching.cancel()

    JUDGED["wait"] = True
    world.play(scene, samples_in_flight=8)
    assert max(generating for generating, _ in seen) <= 4
    assert max(held for _, held in seen) == 5
    world.world.check()


def test_suspects_run_one_at_a_time_and_the_last_try_alone(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url, {"max_deaths": 2})
    world.admit(4)
    for group_id in ("1", "2"):  # as if a worker had died with each of them
        buffer.client.zadd(f"rollq:{{{buffer.run}:math}}:suspects", {group_id: 1})
        buffer.client.hset(f"rollq:{{{buffer.run}:math}}:group:{group_id}", "deaths", 1)
    alone: list[int] = []

    async def scene(worker: Worker, script: Script) -> None:
        async def watch() -> None:
            while True:
                held = list(worker.table)
                suspects = [entry for entry in held if entry.lease.suspect]
                assert len(suspects) <= 1
                if suspects and suspects[0].lease.alone:
                    assert len(held) == 1
                    alone.append(suspects[0].lease.group_id)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        while world.count(Status.COMPLETED) < 4:
            await asyncio.sleep(0.05)
            if world.queue.count == 0:
                world.tickets(1)
        watching.cancel()

    world.play(scene)
    assert set(alone) == {1, 2}
    world.world.check()


def test_an_outage_of_the_server_loses_nothing_and_counts_no_try(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        world = WorkerWorld(buffer, fresh_server.url)
        world.admit(3)

        async def scene(worker: Worker, script: Script) -> None:
            await world.until(lambda: script.running == 6)
            await asyncio.to_thread(fresh_server.stop)
            script.gate.set()
            await world.until(lambda: script.running == 0)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(fresh_server.start)
            await world.until_count(Status.COMPLETED, 3)
            world.admit(1)
            await world.until_count(Status.COMPLETED, 4)

        world.play(scene, open_gate=False)
        assert len(world.results(4)) == 4
        world.world.check()


def test_sigterm_during_an_outage_ends_the_worker(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        world = WorkerWorld(buffer, fresh_server.url)
        world.admit(2)

        async def scene(worker: Worker, script: Script) -> None:
            await world.until(lambda: script.running == 4)
            await asyncio.to_thread(fresh_server.stop)
            await asyncio.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)

        world.play(scene, open_gate=False, grace_s=0.1)
        fresh_server.start()
        assert world.count(Status.RUNNING) == 2  # the server could not be reached: their leases run out
        world.world.check()


def test_a_shutdown_does_not_wait_for_a_server_that_was_away_from_the_start(
    fresh_server: EmbeddedServer, server_url: str, run_name: str
) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        world = WorkerWorld(buffer, fresh_server.url)
        world.queue = open_queue(server_url, run_name)

        async def run() -> None:
            worker = Worker(buffer, world.queue, {"math": world.task}, world.settings(Script()), 7)
            serving = asyncio.create_task(worker.run())
            await world.until(lambda: worker.rq.key.encode() in world.queue.connection.keys("rq:worker:*"))
            worker.rq.request_shutdown()
            await asyncio.wait_for(serving, PATIENCE_S)

        fresh_server.stop()
        asyncio.run(run())


def test_a_flushed_store_stops_the_worker(fresh_server: EmbeddedServer, run_name: str) -> None:
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        world = WorkerWorld(buffer, fresh_server.url)

        async def scene(worker: Worker, script: Script) -> None:
            await world.until(lambda: worker.host.published.is_set())
            buffer.client.flushall()
            await world.until(lambda: worker.rq.fatal is not None)

        with pytest.raises(StoreLost):
            world.play(scene)


def test_a_paused_run_spends_no_tickets_and_goes_on_when_it_is_resumed(world: WorkerWorld) -> None:
    set_clock(world.buffer, "math", control="pause")

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: worker.control.state is WorkerState.PAUSED)
        set_clock(world.buffer, "math", control="run")
        world.admit(2)
        await world.until_count(Status.COMPLETED, 2)

    world.play(scene)


def test_xp14_an_unexpected_error_hands_the_group_back_with_its_words(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.admit(1)

    def broken(*args: object) -> float:
        raise ZeroDivisionError("no such sampling")

    monkeypatch.setattr("rollq.workers.groups.recipes.Recipe.sampling", broken)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: bool(world.error(1)))

    world.play(scene)
    assert world.error(1) == "ZeroDivisionError: no such sampling"
    assert world.count(Status.PENDING) == 1
    world.world.check()


def test_reports_show_what_the_worker_does_until_it_stops(world: WorkerWorld) -> None:
    world.admit(2)
    seen: dict[str, object] = {}

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: any(report["groups"] == 2 for report in world.buffer.workers().values()))
        (report,) = world.buffer.workers().values()
        seen.update(report)

    world.play(scene)
    assert seen["version"] == 0
    assert seen["epoch"] == 1
    assert seen["pid"] == os.getpid()
    assert seen["tokens"] == 12
    assert world.buffer.workers() == {}
