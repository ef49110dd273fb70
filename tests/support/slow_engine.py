"""A simulated engine that is slower than any test, and time that passes when a test says so."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rollq.workers.engines.protocol import Completion, Request, SwapMode, WeightsVersion
from rollq.workers.engines.simulated import SimulatedEngine, SimulatedSettings
from support.worker_run import Script


class SlowEngine(SimulatedEngine):
    """Makes one token per second. The script remembers what was asked of it."""

    def __init__(self, script: Script, lengths: Sequence[int]) -> None:
        super().__init__(SimulatedSettings(lengths=tuple(lengths), tokens_per_s=1.0))
        self._script = script

    async def generate(self, request: Request) -> Completion:
        self._script.running += 1
        try:
            return await super().generate(request)
        finally:
            self._script.running -= 1

    async def swap(self, weights: Path, version: WeightsVersion, mode: SwapMode) -> float:
        self._script.swaps.append((version, mode))
        return await super().swap(weights, version, mode)


def pass_time(seconds: float) -> None:
    """Move the running event loop's clock forward: timers that are due within `seconds` fire now."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
