"""What is bad or slow harms only itself: a sample its siblings not, a group, task, judge or worker the others not."""

import asyncio
import gc
import multiprocessing
import weakref
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import Prompt, Sample, SampleStatus, Status
from rollq.workers.agents.loops import Rollout, SingleTurn
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import Completion, Engine, EngineDead, Request, Sampling
from rollq.workers.engines.registry import make_engine
from rollq.workers.groups.recipes import make_recipes
from rollq.workers.groups.sample_maker import all_of
from rollq.workers.groups.task_settings import WorkerTask
from rollq.workers.judging.judge import JudgeContext
from rollq.workers.judging.judges import make_judge
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.run import Worker
from rollq.workers.settings import WorkerSettings
from support.openai_server import CompletionsServer
from support.pauses import set_pauses
from support.waiting import PATIENCE_S
from support.worker_run import Script, ScriptedEngine, WorkerWorld

ONE_MAY_FAIL = {"min_valid_samples": 1}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pauses(monkeypatch, first_s=0.001, longest_s=0.002)


def served_engine(**options: Any) -> Engine:
    """A custom engine by dotted path: the built-in one over HTTP, which tries twice with short timeouts."""
    return make_engine("openai", {"retries": 1, **options})


class Moody:
    """An agent loop that raises for prompts and seeds that it does not like."""

    resumable: ClassVar[bool] = True
    bad_seeds: ClassVar[set[int | None]] = set()

    async def run(self, rollout: Rollout) -> Sample:
        if not Moody.bad_seeds:  # the first sample that comes
            Moody.bad_seeds.add(rollout.sampling.seed)
        if rollout.sampling.seed in Moody.bad_seeds:
            raise LookupError("the browser crashed")
        return await SingleTurn().run(rollout)


async def endless_judge(prompt: Prompt, sample: Sample) -> float:
    """A judge that takes longer than the test."""
    await asyncio.Event().wait()
    return 1.0


async def completed(world: WorkerWorld, count: int) -> None:
    await world.until_count(Status.COMPLETED, count)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (["400"], 'HTTP 400: {"error": "said 400"}'),
        (["garbage", "garbage"], "the answer is not JSON: b'<html>not json'"),
        (["no ids"], "use a server with return_token_ids"),
    ],
)
def test_sb05_a_sample_that_fails_leaves_its_siblings_what_they_have(
    buffer: Buffer, server_url: str, plan: list[str], words: str
) -> None:
    world = WorkerWorld(buffer, server_url, ONE_MAY_FAIL)
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await completed(world, 1)

    with CompletionsServer() as server:
        server.plan_of_first.extend(plan)
        world.play(scene, engine=f"{__name__}.served_engine", options={"urls": [server.url]})
        assert len(server.bodies) == len(plan) + 1
    [(_, samples)] = world.results(1)
    bad, good = sorted(samples, key=lambda sample: sample.status is SampleStatus.COMPLETED)
    assert bad.status is SampleStatus.FAILED
    assert bad.error is not None
    assert words in bad.error
    assert good.status is SampleStatus.COMPLETED
    assert good.text == "42"
    assert good.reward is not None
    world.world.check()


def test_sb05_a_sample_is_tried_again_alone(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url)
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await completed(world, 1)

    with CompletionsServer() as server:
        server.plan_of_first.extend(["500"])
        world.play(scene, engine=f"{__name__}.served_engine", options={"urls": [server.url]})
        seeds = [body["seed"] for body in server.bodies]
    assert sorted(map(seeds.count, set(seeds))) == [1, 2]
    [(_, samples)] = world.results(1)
    assert [sample.status for sample in samples] == [SampleStatus.COMPLETED] * 2


def test_sb06_a_server_that_dies_hands_its_groups_back_and_they_are_made_on_the_next(
    buffer: Buffer, server_url: str
) -> None:
    world = WorkerWorld(buffer, server_url)
    world.admit(1)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: bool(world.error(1)))
        assert "the engine died" in world.error(1)
        assert "said 503" in world.error(1)
        world.tickets(1)
        await completed(world, 1)

    with CompletionsServer("503", "503", "503", "503") as server:
        server.probe_plan.extend(["ok", "ok"] * 2)  # at the start, and when it is to serve version 0
        server.probe_plan.extend(["503", "503"])
        world.play(scene, engine=f"{__name__}.served_engine", options={"urls": [server.url]})
    assert world.buffer.inspect("math", 1)["attempt"] == "2"
    world.world.check()


def test_xp14_the_error_of_one_sample_is_raised_and_not_the_end_of_its_siblings() -> None:
    """A group whose engine died must not look like one that was stopped, at any position among the errors."""

    async def endless() -> None:
        await asyncio.Event().wait()

    async def dies() -> None:
        await asyncio.sleep(0)
        raise EngineDead("the GPU fell off the bus")

    for position in range(3):
        work = [endless(), endless()]
        work.insert(position, dies())
        with pytest.raises(EngineDead):
            asyncio.run(all_of(work))


def test_xp14_an_engine_dies_also_when_the_request_that_saw_it_is_cancelled_meanwhile() -> None:
    closing = asyncio.Event()

    class Dying(ScriptedEngine):
        async def generate(self, request: Request) -> Completion:
            raise EngineDead("the GPU fell off the bus")

        async def close(self) -> None:
            closing.set()
            await asyncio.sleep(0.01)

    async def scene() -> None:
        script = Script()
        host = EngineHost(lambda: Dying(script), restarts=1)
        await host.start()
        alive = asyncio.create_task(host.keep_alive())
        asking = asyncio.create_task(host.generate(Request(np.zeros(1, np.int32), Sampling(max_tokens=2))))
        await closing.wait()
        asking.cancel()
        while host.version is None:
            await asyncio.sleep(0.005)
        assert len(script.engines) == 2
        alive.cancel()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def restart_frozen() -> None:
    """An engine dies, and is collected before the next one starts; in a separate process, whose heap is frozen."""
    engines: list[weakref.ref[Engine]] = []

    class Dying(ScriptedEngine):
        def __init__(self, script: Script) -> None:
            super().__init__(script)
            self.me = self  # only the garbage collector frees it
            engines.append(weakref.ref(self))

        async def generate(self, request: Request) -> Completion:
            raise EngineDead("the GPU fell off the bus")

    async def scene() -> None:
        host = EngineHost(lambda: Dying(Script()), restarts=1, freeze=True)
        await host.start()
        assert gc.get_freeze_count() > 0
        alive = asyncio.create_task(host.keep_alive())
        with pytest.raises(EngineDead):
            await host.generate(Request(np.zeros(1, np.int32), Sampling(max_tokens=2)))
        while host.version is None:
            await asyncio.sleep(0.005)
        alive.cancel()
        assert [engine() is None for engine in engines] == [True, False]

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_what_an_engine_brought_is_frozen_and_freed_when_it_is_dead() -> None:
    process = multiprocessing.get_context("spawn").Process(target=restart_frozen)
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0


def test_xp14_an_exception_in_an_agent_loop_ends_that_sample_only_with_the_error_kept(
    buffer: Buffer, server_url: str
) -> None:
    Moody.bad_seeds.clear()
    world = WorkerWorld(buffer, server_url, {**ONE_MAY_FAIL, "agent_loop": f"{__name__}.Moody"})
    world.admit(3)

    async def scene(worker: Worker, script: Script) -> None:
        await completed(world, 3)

    world.play(scene)
    samples = [sample for _, group in world.results(3) for sample in group]
    [bad] = [sample for sample in samples if sample.status is not SampleStatus.COMPLETED]
    assert bad.status is SampleStatus.FAILED
    assert bad.error is not None
    assert bad.error.partition(" (tests")[0] == "agent loop: LookupError: the browser crashed"
    assert len(samples) == 6
    world.world.check()


def test_xp16_redis_names_no_code_and_each_worker_uses_what_its_own_configuration_names(
    buffer: Buffer, server_url: str
) -> None:
    """The same run, worked by two configurations: each judges with its own judge, and Redis knows of neither."""
    world = WorkerWorld(buffer, server_url, {"judge": "support.worker_run.own_judge", "max_tries": 1})
    planted = Prompt("2 + 2", metadata={"judge": "os.system", "agent_loop": "os.system", "engine": "os.system"})
    clock = buffer.clock("math")
    admitted = buffer.admit("math", [(planted, 1)], epoch=clock.epoch, cursor=0, target=1000, step=clock.step)
    assert admitted.count == 1
    world.tickets(1)

    async def failing(worker: Worker, script: Script) -> None:
        await world.until_count(Status.FAILED, 1)

    async def judged(worker: Worker, script: Script) -> None:
        await completed(world, 1)

    world.play(failing)
    assert "the judge is out" in world.error(1)
    world.tasks["math"] = world.task.model_copy(update={"judge": "exact_match", "agent_loop": f"{__name__}.Calm"})
    world.admit(1)
    world.play(judged)
    assert [sample.extra["calm"] for _, samples in world.results(1) for sample in samples] == [True, True]

    client: Any = buffer.client
    stored = b"".join(everything(client, buffer.run))
    assert b"os.system" in stored  # the prompt's own words, which nothing reads as a name
    judge_errors = stored.count(b"judge 'support.worker_run.own_judge'")  # these name it for people
    places = stored.count(b"(tests/support/worker_run.py:")
    for name, times in ((b"worker_run", judge_errors + places), (b"test_isolation", 0), (b"ScriptedEngine", 0)):
        assert stored.count(name) == times


class Calm:
    """A custom agent loop."""

    resumable: ClassVar[bool] = False

    async def run(self, rollout: Rollout) -> Sample:
        return replace(await SingleTurn().run(rollout), extra={"calm": True})


def everything(client: Any, run: str) -> list[bytes]:
    """Every value of every key that a run has in Redis."""
    found: list[bytes] = []
    for key in client.scan_iter(match=f"*{run}*"):
        kind = client.type(key)
        if kind == b"hash":
            found += [part for pair in client.hgetall(key).items() for part in pair]
        elif kind == b"string":
            found.append(client.get(key))
        elif kind == b"list":
            found += client.lrange(key, 0, -1)
        elif kind == b"zset":
            found += client.zrange(key, 0, -1)
        elif kind == b"set":
            found += client.smembers(key)
    return found


@pytest.mark.parametrize(
    "name", ["os.system.", "system", "..", ".system", "os.name", "no_such_package.judge", "os.no_such_function"]
)
def test_xp16_a_name_that_leads_nowhere_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match="judge"):
        make_judge(name, {}, JudgeContext(1, JudgePool(1)))
    tasks = {"math": WorkerTask(batch_groups=1, agent_loop=name)}
    with pytest.raises(ConfigError, match="agent loop"):
        make_recipes(tasks, WorkerSettings(), 0, JudgePool(1))


def test_sb10_a_task_whose_judge_is_slow_does_not_stop_the_others(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url)
    slow = world.task.model_copy(update={"judge": f"{__name__}.endless_judge"})
    world.tasks["slow"] = slow
    buffer.register_task("slow", slow)
    assert world.world.admit(2, "slow") == 2
    world.tickets(2)

    async def scene(worker: Worker, script: Script) -> None:
        await world.until(lambda: buffer.counts("slow").statuses[Status.RUNNING] == 2)
        world.admit(4)
        await completed(world, 4)
        assert buffer.counts("slow").statuses[Status.RUNNING] == 2

    world.play(scene, grace_s=0)
    assert buffer.counts("slow").statuses[Status.PENDING] == 2
    world.world.check()


def test_sb10_a_slow_worker_does_not_stop_the_others(buffer: Buffer, server_url: str) -> None:
    """A worker that sits on its group keeps that group, and nothing else: the batch is made of the others'."""
    world = WorkerWorld(buffer, server_url)
    world.admit(3)
    [held] = world.world.lease(1, worker="slow")

    async def scene(worker: Worker, script: Script) -> None:
        await completed(world, 2)

    world.play(scene)
    assert held.group_id not in [group_id for group_id, _ in world.results(2)]
    assert world.count(Status.RUNNING) == 1
    world.world.check()


def test_sb10_a_slow_sample_holds_up_its_own_group_alone(buffer: Buffer, server_url: str) -> None:
    world = WorkerWorld(buffer, server_url)
    world.admit(3)

    async def scene(worker: Worker, script: Script) -> None:
        await asyncio.to_thread(server.hanging.acquire)
        await completed(world, 2)
        assert world.count(Status.RUNNING) == 1
        server.release()
        await completed(world, 3)

    with CompletionsServer("hang") as server:
        world.play(scene, engine=f"{__name__}.served_engine", options={"urls": [server.url]})
