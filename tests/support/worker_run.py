"""A whole worker against a real server, with an engine that says what the test tells it to."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rq import Queue

from rollq.buffer.buffer import Buffer
from rollq.buffer.tickets import enqueue_tickets, open_queue
from rollq.buffer.values.rollouts import FinishReason, Sample, Status, VersionSpan
from rollq.workers.engines.protocol import Completion, EngineDead, Request, SwapMode, WeightsVersion
from rollq.workers.groups import leases
from rollq.workers.groups.task_settings import WorkerTask
from rollq.workers.run import Worker
from rollq.workers.settings import WorkerSettings
from rollq.workers.tokenizers.byte import EOS_ID
from support.buffer_run import World
from support.waiting import PATIENCE_S


@dataclass
class Script:
    """What the engines do: answer `answer` once `gate` is open. Remembers what was asked of them."""

    answer: str = "42"
    abort_after: int = 3  # tokens that an aborted request has
    deaf: bool = False  # to aborts of single requests
    error: Exception | None = None
    refuse: Exception | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[Request] = field(default_factory=list)
    swaps: list[tuple[WeightsVersion, SwapMode]] = field(default_factory=list)
    sleeps: list[str] = field(default_factory=list)
    engines: list["ScriptedEngine"] = field(default_factory=list)
    running: int = 0


class ScriptedEngine:
    """An `Engine` over a script. `die` ends it."""

    def __init__(self, script: Script) -> None:
        self.version = WeightsVersion(0, 0, "")
        self.script = script
        self._interrupt: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._stops: dict[Request, asyncio.Future[str]] = {}
        script.engines.append(self)

    async def start(self) -> None:
        return None

    async def generate(self, request: Request) -> Completion:
        script = self.script
        script.requests.append(request)
        if script.error is not None:
            raise script.error
        version, interrupt = self.version, self._interrupt
        script.running += 1
        opened: asyncio.Future[Any] = asyncio.ensure_future(script.gate.wait())
        stopped = self._stops[request] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({opened, interrupt, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            script.running -= 1
            opened.cancel()
            del self._stops[request]
        why = next((end.result() for end in (interrupt, stopped) if end.done()), "finished")
        if why == "died":
            raise EngineDead("the GPU fell off the bus")
        ids = [*script.answer.encode(), EOS_ID][0 if request.prefix_ids is None else len(request.prefix_ids) :]
        reason = FinishReason.STOP
        if why == "aborted":
            ids, reason = ids[: script.abort_after], FinishReason.ABORT
        elif len(ids) > request.sampling.max_tokens:
            ids, reason = ids[: request.sampling.max_tokens], FinishReason.LENGTH
        return Completion(
            np.array(ids, dtype=np.int32),
            np.full(len(ids), -0.5, dtype=np.float32),
            (VersionSpan(version.epoch, version.version, len(ids)),) if ids else (),
            reason,
        )

    async def swap(self, weights: Path, version: WeightsVersion, mode: SwapMode) -> float:
        if self.script.refuse is not None:
            raise self.script.refuse
        self.script.swaps.append((version, mode))
        self.script.sleeps.append(f"swap {version.version}")
        self.version = version
        if mode is SwapMode.ABORT:
            self._end("aborted")
        return 0.0

    async def abort(self, requests: Collection[Request]) -> None:
        for request in () if self.script.deaf else requests:
            self._stops[request].set_result("aborted")  # the worker knows what runs

    async def sleep(self) -> None:
        self.script.sleeps.append("sleep")

    async def wake(self) -> None:
        self.script.sleeps.append("wake")

    async def close(self) -> None:
        self._end("died")

    def die(self) -> None:
        self._end("died")

    def _end(self, why: str) -> None:
        self._interrupt.set_result(why)
        self._interrupt = asyncio.get_running_loop().create_future()


class LoadingEngine(ScriptedEngine):
    """An engine whose start never ends."""

    async def start(self) -> None:
        self.script.sleeps.append("starting")
        try:
            await asyncio.Event().wait()
        finally:
            self.script.sleeps.append("start ended")


def cold_judge(prompt: Any, sample: Sample) -> float:
    """A judge that accepts nothing."""
    return 0.0


def strict_judge(prompt: Any, sample: Sample) -> float:
    """A judge that fails for wrong answers."""
    if sample.text != prompt.answer:
        raise RuntimeError("this is not the answer")
    return 1.0


async def own_judge(prompt: Any, sample: Sample) -> float:
    """A judge that fails."""
    raise RuntimeError("the judge is out")


def age_leases(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers take the leases that they hold for older: they renew them, or see that they have run out."""
    monkeypatch.setattr(leases, "monotonic", lambda: time.monotonic() + seconds)


Scene = Callable[[Worker, Script], Awaitable[None]]


@dataclass
class WorkerWorld:
    """One run of one task on a real server, its queue, and workers on demand."""

    buffer: Buffer
    url: str
    rules: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = World(self.buffer)
        self.queue: Queue = open_queue(self.url, self.buffer.run)
        given = {"batch_groups": 4, "group_size": 2, **self.rules}
        self.task = WorkerTask.model_validate(given)
        self.tasks = {"math": self.task}
        self.buffer.create_run()
        self.buffer.register_task("math", self.task)
        self.world.held = self.buffer.begin_epoch(
            trainer_id="trainer", launch_id="launch", from_step=0, mode="replay", uri="", digest="d0"
        )

    def publish(self, version: int) -> None:
        self.buffer.publish(self.world.held, version, uri="", digest=f"d{version}")

    def admit(self, count: int, *, groups_per_job: int = 1) -> None:
        """New prompts, and tickets for them."""
        assert self.world.admit(count) == count
        self.tickets(count, groups_per_job)

    def tickets(self, groups: int, groups_per_job: int = 1) -> list[str]:
        return enqueue_tickets(self.queue, self.buffer.run, -(-groups // groups_per_job), groups_per_job)

    def recycle(self, count: int) -> None:
        recycled = self.buffer.recycle("math", epoch=1, target=1000, limit=count)
        assert recycled == count
        self.tickets(count)

    def play(self, scene: Scene, *, answer: str = "42", open_gate: bool = True, **settings: Any) -> Script:
        """Run a worker while `scene` plays, then stop it."""

        async def run() -> Script:
            script = Script(answer=answer)
            if open_gate:
                script.gate.set()
            with Buffer.connect(self.url, self.buffer.run) as buffer:
                worker = Worker(buffer, self.queue, self.tasks, self.settings(script, **settings), 7)
                serving = asyncio.create_task(worker.run())
                playing = asyncio.create_task(self._scene(scene, worker, script))
                await asyncio.wait([serving, playing], return_when=asyncio.FIRST_COMPLETED)
                if not serving.done() and not worker.intake.stopped:
                    worker.rq.request_shutdown()
                await asyncio.wait_for(serving, PATIENCE_S)
                await playing
                assert worker.table.generating <= len(worker.table)
            return script

        return asyncio.run(run())

    async def _scene(self, scene: Scene, worker: Worker, script: Script) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scene(worker, script)

    def settings(self, script: Script, *, lengths: Sequence[int] = (), **settings: Any) -> WorkerSettings:
        """`lengths` are the lengths of a `SlowEngine`'s answers."""
        options = {"script": script, **({"lengths": lengths} if lengths else {})}
        return WorkerSettings.model_validate(
            {"engine": "support.worker_run.ScriptedEngine", "options": options, "grace_s": PATIENCE_S, **settings}
        )

    def count(self, status: Status) -> int:
        return self.buffer.counts("math").statuses[status]

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.02)

    async def until_count(self, status: Status, count: int) -> None:
        await self.until(lambda: self.count(status) == count)

    def results(self, count: int) -> list[tuple[int, Sequence[Sample]]]:
        """Id and samples of `count` completed groups, by id."""
        claimed = self.world.claim(self.buffer.clock("math").step, math=count)
        groups = self.buffer.fetch(sorted(claimed.groups, key=lambda group: group.group_id))
        return [(group.group_id, group.samples) for group in groups]

    def error(self, group_id: int) -> str:
        return self.buffer.inspect("math", group_id).get("error", "")
