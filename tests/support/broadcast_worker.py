"""A worker process that follows weights, with gloo in place of vLLM's NCCL, or fails to in the way that it is told."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.manifest import WEIGHTS_FILE
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import EngineDead, SwapMode, WeightsVersion
from rollq.workers.engines.receiver import Incoming
from rollq.workers.settings import WorkerSettings
from rollq.workers.wake_signals import Signals
from rollq.workers.wakeups import Wakeups
from rollq.workers.weight_follower import WeightFollower
from support.gloo_group import GlooProcessGroup, come

REPORT_S = 0.1


class GlooEngine:
    """Takes weights and keeps them in `folder`/<worker>-<version>.safetensors. `behaviour` applies to its first
    life."""

    transfer_ranks = 1
    lives = 0

    def __init__(self, buffer: Buffer, name: str, behaviour: str, folder: Path) -> None:
        self.version = WeightsVersion(0, 0, "")
        GlooEngine.lives += 1
        self._buffer = buffer
        self._name = name
        self._behaviour = behaviour if GlooEngine.lives == 1 else ""
        self._folder = folder

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def swap(self, weights: Path, version: WeightsVersion, mode: SwapMode) -> float:
        self._serve(load_file(weights / WEIGHTS_FILE), version, "file")
        return 0.0

    async def receive(self, incoming: Incoming, version: WeightsVersion, mode: SwapMode) -> float:
        if self._behaviour == "has another model":
            raise WeightsError("they lack 'bias'")
        if self._behaviour == "dies before it is ready":
            os.kill(os.getpid(), signal.SIGKILL)
        plan = await incoming.join(self.transfer_ranks)
        if self._behaviour == "dies as a member":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            group: GlooProcessGroup = await asyncio.to_thread(come, plan.init_info)
            if self._behaviour == "dies while it receives":
                os.kill(os.getpid(), signal.SIGKILL)
            tensors = await asyncio.to_thread(lambda: dict(group.receive(plan.update_info)))
        except RuntimeError as error:
            raise EngineDead(f"gloo broke: {error}") from error
        self._serve(tensors, version, "round")
        return 0.0

    def _serve(self, tensors: dict[str, torch.Tensor], version: WeightsVersion, how: str) -> None:
        self.version = version
        path = self._folder / f"{self._name}-{version.version}.safetensors"
        save_file(tensors, path, metadata={"how": how})
        self._buffer.client.rpush(f"{self._buffer.run}:served", f"{self._name} {version.version}")


def follow(url: str, run: str, name: str, behaviour: str, folder: Path) -> None:
    """Follow weights until killed."""
    torch.set_num_threads(1)
    with Buffer.connect(url, run) as buffer:
        asyncio.run(_follow(buffer, name, behaviour, folder))


async def _follow(buffer: Buffer, name: str, behaviour: str, folder: Path) -> None:
    def make() -> Any:
        return GlooEngine(buffer, name, behaviour, folder)

    calls = BufferCalls(buffer)
    host, signals = EngineHost(make, restarts=3), Signals()
    wakeups = Wakeups(calls, signals)
    follower = WeightFollower(calls, host, signals, WorkerSettings(weights_folder=folder), worker=name)

    async def report() -> None:
        while True:
            await calls(buffer.report_worker, name, {"transfer_ranks": host.transfer_ranks, "state": "run"})
            await asyncio.sleep(REPORT_S)

    with follower:
        await host.start()
        await asyncio.gather(wakeups.run(), follower.run(), host.keep_alive(), report())
