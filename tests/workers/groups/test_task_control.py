"""Pausing, sleeping and stopping: running groups end in one status, keep their tokens, and continue afterwards."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.orders import Order
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.values.rollouts import FinishReason, Lease, Prompt, Sample, SampleStatus, Status
from rollq.workers.agents.loops import Rollout, SingleTurn
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import SwapMode, WeightsVersion
from rollq.workers.groups.sample_maker import priority
from rollq.workers.groups.task_control import WorkerState, leasable, should_interrupt, wants_sleep
from rollq.workers.run import Worker
from rollq.workers.settings import PauseMode
from support.slow_engine import pass_time
from support.waiting import PATIENCE_S
from support.worker_run import Script, ScriptedEngine, WorkerWorld

FIRST = WeightsVersion(1, 0, "a")
RUN, PAUSE, SLEEP, STOPPED, DONE = Control.RUN, Control.PAUSE, Control.SLEEP, Control.STOPPED, Control.DONE


@pytest.fixture
def world(buffer: Buffer, server_url: str) -> WorkerWorld:
    return WorkerWorld(buffer, server_url)


def partial_world(buffer: Buffer, server_url: str, **rules: object) -> WorkerWorld:
    return WorkerWorld(buffer, server_url, {"partial_rollout": True, "max_staleness": 4, **rules})


def lease(*, must_finish: bool = False) -> Lease:
    return Lease("math", 1, 1, "nonce", 1, Prompt("?"), (), step=3, must_finish=must_finish)


def kept_tokens(buffer: Buffer, group_id: int) -> list[int]:
    """Response tokens of each sample of a group that waits for its next attempt."""
    buffer.recycle("math", epoch=1, target=1000, limit=10)
    (live,) = buffer.lease(["math"], 1, worker="looks", version=0, epoch=1).leases
    assert live.group_id == group_id
    return [sample.response_tokens for sample in live.samples]


@pytest.mark.parametrize(
    ("controls", "open_tasks", "sleeps"),
    [
        ({"a": RUN, "b": RUN}, ("a", "b"), False),
        ({"a": RUN, "b": PAUSE}, ("a",), False),
        ({"a": DONE, "b": SLEEP}, ("a",), False),  # the engine is still needed
        ({"a": PAUSE, "b": STOPPED}, (), False),
        ({"a": PAUSE, "b": SLEEP}, (), True),
        ({"a": SLEEP, "b": SLEEP}, (), True),
    ],
)
def test_controls_say_what_is_leased_and_when_the_engine_sleeps(
    controls: dict[str, Control], open_tasks: tuple[str, ...], sleeps: bool
) -> None:
    assert leasable(controls) == open_tasks
    assert wants_sleep(controls) is sleeps


@pytest.mark.parametrize(
    ("must_finish", "paused_s", "mode", "ends"),
    [
        (False, 0.0, PauseMode.ABORT, True),
        (True, 0.0, PauseMode.ABORT, False),
        (True, 60.0, PauseMode.ABORT, True),
        (False, 59.0, PauseMode.DRAIN, False),
        (False, 60.0, PauseMode.DRAIN, True),
    ],
)
def test_xp13_a_pause_drains_what_is_not_to_be_interrupted_again_but_not_for_ever(
    must_finish: bool, paused_s: float, mode: PauseMode, ends: bool
) -> None:
    assert should_interrupt(lease(must_finish=must_finish), paused_s, mode, 60.0) is ends


def test_xp12_a_pause_that_drains_takes_nothing_new_and_lets_the_rest_finish(world: WorkerWorld) -> None:
    world.admit(3)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 4)
        world.buffer.set_control("math", PAUSE)
        await world.until(lambda: worker.control.state is WorkerState.DRAINING)
        script.gate.set()
        await world.until_count(Status.COMPLETED, 2)
        await world.until(lambda: worker.control.state is WorkerState.PAUSED)
        assert world.count(Status.PENDING) == 1
        world.buffer.set_control("math", RUN)
        await world.until_count(Status.COMPLETED, 3)

    world.play(scene, open_gate=False, samples_in_flight=4)
    world.world.check()


def test_a_worker_that_is_paused_takes_nothing_and_goes_on_when_it_is_resumed(world: WorkerWorld) -> None:
    world.admit(2)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        world.buffer.order_worker(worker.rq.name, Order.PAUSE)
        await world.until(lambda: worker.control.state is WorkerState.DRAINING)
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)
        await world.until(lambda: worker.control.state is WorkerState.PAUSED)
        assert world.count(Status.PENDING) == 1
        world.buffer.order_worker(worker.rq.name, Order.RUN)
        await world.until_count(Status.COMPLETED, 2)

    world.play(scene, open_gate=False, samples_in_flight=2)
    world.world.check()


def test_a_worker_that_is_drained_ends_with_what_it_has_and_signs_off(world: WorkerWorld) -> None:
    world.admit(2)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        world.buffer.order_worker(worker.rq.name, Order.DRAIN)
        await asyncio.wait_for(worker.rq.until_stop(), PATIENCE_S)
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)

    world.play(scene, open_gate=False, samples_in_flight=2)
    assert world.count(Status.PENDING) == 1
    assert (world.buffer.workers(), world.buffer.client.hgetall(world.buffer.keys.orders)) == ({}, {})
    world.world.check()


@pytest.mark.parametrize("control", [PAUSE, STOPPED])
def test_xp12_a_pause_that_aborts_keeps_the_tokens_of_a_partial_rollout(
    buffer: Buffer, server_url: str, control: Control
) -> None:
    world = partial_world(buffer, server_url)
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        buffer.set_control("math", control)
        await world.until_count(Status.ABORTED, 1)
        await world.until(lambda: worker.control.state is WorkerState.PAUSED)

    world.play(scene, answer="123456", open_gate=False, pause="abort")
    world.world.check()
    buffer.set_control("math", RUN)
    assert kept_tokens(buffer, 1) == [3, 3]


HELD = {"judge": False, "asked": 0}


async def held_judge(prompt: Prompt, sample: Sample) -> float:
    HELD["asked"] += bool(sample.sampling["seed"])  # 0: an own answer, before anything is made
    while HELD["judge"] and sample.sampling["seed"]:
        await asyncio.sleep(0.005)
    return 1.0


@pytest.mark.parametrize("partial_rollout", [True, False])
@pytest.mark.parametrize("stop", ["pause", "timeout"])
def test_answers_that_are_whole_are_judged_again_and_not_made_again(
    buffer: Buffer, server_url: str, stop: str, partial_rollout: bool
) -> None:
    judge = f"{__name__}.held_judge"
    world = partial_world(buffer, server_url, judge=judge, partial_rollout=partial_rollout)
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: HELD["asked"] == 2)
        if stop == "pause":
            buffer.set_control("math", PAUSE)
        await world.until_count(Status.ABORTED, 1)
        HELD["judge"] = False
        if stop == "pause":
            buffer.set_control("math", RUN)
        world.recycle(1)
        await world.until_count(Status.COMPLETED, 1)

    HELD.update(judge=True, asked=0)
    script = world.play(scene, answer="123456", pause="abort", attempt_timeout_s=0.5 if stop == "timeout" else 60)
    assert len(script.requests) == 2
    assert HELD["asked"] == 4
    ((_, samples),) = world.results(1)
    assert [(sample.text, sample.reward, sample.finish_reason) for sample in samples] == [
        ("123456", 1.0, FinishReason.STOP)
    ] * 2
    world.world.check()


class Unstorable(SingleTurn):
    """A loop whose first sample has a value that the buffer refuses."""

    async def run(self, rollout: Rollout) -> Sample:
        made = await super().run(rollout)
        return made if rollout.index else replace(made, extra={"value": object()})


def test_an_answer_that_cannot_be_stored_fails_alone_if_its_group_is_stopped_while_it_is_judged(
    buffer: Buffer, server_url: str
) -> None:
    loops = {"judge": f"{__name__}.held_judge", "agent_loop": f"{__name__}.Unstorable"}
    world = partial_world(buffer, server_url, min_valid_samples=1, **loops)
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: HELD["asked"] == 2)
        buffer.set_control("math", PAUSE)
        await world.until(lambda: world.count(Status.RUNNING) == 0)
        assert world.count(Status.ABORTED) == 1
        HELD["judge"] = False
        buffer.set_control("math", RUN)
        world.recycle(1)
        await world.until_count(Status.COMPLETED, 1)

    HELD.update(judge=True, asked=0)
    assert len(world.play(scene, answer="123456", pause="abort").requests) == 2
    ((_, samples),) = world.results(1)
    assert [sample.status for sample in samples] == [SampleStatus.FAILED, SampleStatus.COMPLETED]
    assert "cannot be written as JSON" in (samples[0].error or "")
    world.world.check()


class KeepsUnstorable(SingleTurn):
    """A loop whose first sample has kept a value that the buffer refuses, and returns nothing when it is stopped."""

    async def run(self, rollout: Rollout) -> Sample:
        made = await super().run(rollout)
        if rollout.index == 0 and rollout.keep:
            rollout.keep(replace(made, status=SampleStatus.ABORTED, extra={"value": object()}))
            await asyncio.Event().wait()
        return made


def test_an_answer_whose_kept_part_cannot_be_stored_fails_alone_if_its_group_is_stopped(
    buffer: Buffer, server_url: str
) -> None:
    world = partial_world(buffer, server_url, min_valid_samples=1, agent_loop=f"{__name__}.KeepsUnstorable")
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: len(script.requests) == 2 and script.running == 0)
        buffer.set_control("math", PAUSE)
        await world.until(lambda: world.count(Status.RUNNING) == 0)

    world.play(scene, answer="123456", pause="abort")
    ((_, samples),) = world.results(1)
    assert [sample.status for sample in samples] == [SampleStatus.FAILED, SampleStatus.COMPLETED]
    assert "cannot be written as JSON" in (samples[0].error or "")
    world.world.check()


class Boxed(SingleTurn):
    """A loop whose judge looks at something that is removed once the sample has been judged."""

    async def run(self, rollout: Rollout) -> Sample:
        rollout.at_end(lambda: None)
        return await super().run(rollout)


def test_answers_whose_judge_needs_their_workspace_are_made_again(buffer: Buffer, server_url: str) -> None:
    world = partial_world(buffer, server_url, judge=f"{__name__}.held_judge", agent_loop=f"{__name__}.Boxed")
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: HELD["asked"] == 2)
        buffer.set_control("math", PAUSE)
        await world.until_count(Status.PENDING, 1)
        HELD["judge"] = False
        buffer.set_control("math", RUN)
        world.tickets(1)
        await world.until_count(Status.COMPLETED, 1)

    HELD.update(judge=True, asked=0)
    assert len(world.play(scene, answer="123456", pause="abort").requests) == 4
    world.world.check()


def test_xp12_a_pause_that_aborts_sends_prompts_without_partial_rollout_back_uncounted(world: WorkerWorld) -> None:
    world.admit(2)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 4)
        world.buffer.set_control("math", PAUSE)
        await world.until_count(Status.PENDING, 2)
        assert script.running == 0

    world.play(scene, answer="123456", open_gate=False, pause="abort")
    assert {world.buffer.inspect("math", group_id)["tries"] for group_id in (1, 2)} == {"0"}
    world.world.check()


@pytest.mark.parametrize("mode", ["drain", "abort"])
def test_xp12_a_group_that_is_stuck_is_cut_off_and_its_prompt_goes_back(world: WorkerWorld, mode: str) -> None:
    """XTuner loses the prompt of a rollout that does not end in time."""
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        script.deaf = True
        await world.until(lambda: script.running == 2)
        world.buffer.set_control("math", PAUSE)
        await world.until_count(Status.PENDING, 1)
        assert script.running == 0
        world.buffer.set_control("math", RUN)
        world.tickets(1)
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)

    world.play(scene, open_gate=False, pause=mode, pause_timeout_s=0.1)
    world.world.check()


def test_xp12_a_task_that_is_paused_does_not_stop_the_others(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url)
    world.tasks["code"] = world.task
    buffer.register_task("code", world.task)
    world.admit(2)
    assert world.world.admit(2, "code") == 2
    buffer.set_control("math", PAUSE)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: worker.control.open_tasks == ("code",))
        world.tickets(4)
        await world.until(lambda: buffer.counts("code").statuses[Status.COMPLETED] == 2)
        assert world.count(Status.PENDING) == 2

    world.play(scene)
    world.world.check()


def test_xm04_the_engine_sleeps_when_nothing_is_in_flight_and_wakes_with_the_newest_weights(
    world: WorkerWorld,
) -> None:
    world.admit(1)

    def states() -> list[object]:
        return [(report["state"], report["asleep_for"]) for report in world.buffer.workers().values()]

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        world.buffer.sleep(world.world.held, "step 1 is being trained")
        await world.until(lambda: worker.control.state is WorkerState.DRAINING)
        assert script.sleeps == ["swap 0"]
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)
        await world.until(lambda: states() == [("asleep", "step 1 is being trained")])
        world.buffer.sleep(world.world.held, "step 1 is being trained again")
        await world.until(lambda: states() == [("asleep", "step 1 is being trained again")])
        world.publish(1)
        world.buffer.sleep(world.world.held, "")
        world.admit(1)
        await world.until_count(Status.COMPLETED, 2)
        await world.until(lambda: states() == [("serving", "")])

    script = world.play(scene, open_gate=False)
    assert script.sleeps == ["swap 0", "sleep", "wake", "swap 1"]
    (_, old), (_, new) = world.results(2)
    assert [old[0].oldest_version, new[0].oldest_version] == [0, 1]
    world.world.check()


def test_weights_that_arrive_as_the_engine_has_fallen_asleep_wait_until_it_is_awake() -> None:
    """Its weights are not on the device. A worker that starts while the trainer trains meets this."""

    async def scene() -> None:
        script = Script()
        host = EngineHost(lambda: ScriptedEngine(script), restarts=0)
        await host.start()
        asleep, late = asyncio.create_task(host.sleep()), asyncio.create_task(host.swap(Path(), FIRST, SwapMode.KEEP))
        await asleep
        assert await late is None
        assert (script.sleeps, host.published.is_set()) == (["sleep"], False)
        await host.wake()
        assert await host.swap(Path(), FIRST, SwapMode.KEEP) == 0.0
        assert (host.version, host.published.is_set()) == (FIRST, True)

    asyncio.run(scene())


def test_the_end_of_a_worker_keeps_the_tokens_of_a_partial_rollout(buffer: Buffer, server_url: str) -> None:
    world = partial_world(buffer, server_url)
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    world.play(scene, answer="123456", open_gate=False, grace_s=0.1)
    assert world.count(Status.ABORTED) == 1
    assert kept_tokens(buffer, 1) == [3, 3]
    world.world.check()


def test_tc10_an_attempt_that_takes_too_long_keeps_the_tokens_of_a_partial_rollout(
    buffer: Buffer, server_url: str
) -> None:
    world = partial_world(buffer, server_url)
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.ABORTED, 1)

    world.play(scene, answer="123456", open_gate=False, attempt_timeout_s=0.3)
    assert kept_tokens(buffer, 1) == [3, 3]
    world.world.check()


def test_xp13_a_group_that_was_interrupted_too_often_finishes_under_the_weights_it_has(
    buffer: Buffer, server_url: str
) -> None:
    world = partial_world(buffer, server_url, tail_batch_max_tries=1)
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        world.publish(1)
        await world.until_count(Status.ABORTED, 1)
        world.recycle(1)
        await world.until(lambda: script.running == 2)
        world.publish(2)
        await world.until(lambda: script.swaps[-1][0].version == 2)
        pass_time(40)
        await world.until_count(Status.COMPLETED, 1)
        await world.until(lambda: worker.host.version is not None and worker.host.version.version == 2)

    world.play(scene, engine="support.slow_engine.SlowEngine", lengths=[40], swap=SwapMode.ABORT)
    ((_, samples),) = world.results(1)
    for sample in samples:
        versions = [span.version for segment in sample.segments for span in segment.versions]
        assert max(versions) == 1, "the second swap waited for it"
        assert sample.response_tokens == 40
    world.world.check()


def test_tc08_an_evaluation_comes_before_the_training_of_the_next_step_in_the_engine() -> None:
    def of(step: int, evaluation: bool) -> Lease:
        return Lease("math", 1, 1, "nonce", 1, Prompt("?"), (), step=step, evaluation=evaluation)

    ordered = [of(3, False), of(3, True), of(4, False), of(4, True)]
    assert [priority(one) for one in ordered] == sorted({priority(one) for one in ordered})


def test_xm01_an_evaluation_finishes_before_a_swap_and_its_tokens_are_of_one_version(
    buffer: Buffer, server_url: str
) -> None:
    world = WorkerWorld(buffer, server_url)
    held_out = world.task.model_copy(update={"kind": "eval"})
    world.tasks["held_out"] = held_out
    buffer.register_task("held_out", held_out)
    state = buffer.open_batch("held_out", "0/held_out", "eval", step=0)
    buffer.fill_batch("held_out", state.handle, 0, [Prompt("question", answer="?")], last=True)

    async def scene(worker: Worker, script: Script) -> None:
        world.tickets(1)
        await world.until(lambda: script.running == 2)
        world.publish(1)
        await world.until(lambda: script.swaps[-1][0].version == 1)
        pass_time(20)
        await world.until(lambda: buffer.batch_by_handle("held_out", state.handle).gathered == 1)
        await world.until(lambda: worker.host.version is not None and worker.host.version.version == 1)
        assert worker.runner.totals.restarted == 0

    world.play(scene, engine="support.slow_engine.SlowEngine", lengths=[20], swap=SwapMode.ABORT)
    world.world.check()


def test_sb04_workers_join_and_leave_while_others_work(world: WorkerWorld) -> None:
    world.admit(6)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 4)
        settings = world.settings(joined := Script())
        with Buffer.connect(world.url, world.buffer.run) as buffer:
            joining = Worker(buffer, world.queue, dict(world.tasks), settings, 7)
            joined.gate.set()
            serving = asyncio.create_task(joining.run())
            await world.until_count(Status.COMPLETED, 4)
            worker.rq.request_shutdown()
            worker.rq.request_shutdown()
            await world.until_count(Status.PENDING, 2)
            world.tickets(2)
            await world.until_count(Status.COMPLETED, 6)
            joining.rq.request_shutdown()
            await serving

    world.play(scene, open_gate=False, samples_in_flight=4)
    world.world.check()
