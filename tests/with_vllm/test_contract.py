"""What every engine promises, on vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollq.workers.engines.protocol import Engine
from support.engine_contract import *  # noqa: F403 - its tests run here
from support.engine_contract import FIRST, Scenario, World
from support.vllm_run import SharedEngine, options

pytest_plugins = "support.vllm_fixtures"


@dataclass(frozen=True)
class SharedWorld(World):
    """Scenarios share an engine, unless they want other options or close it."""

    shared: SharedEngine = field(kw_only=True)

    def run(self, scenario: Scenario, options: Mapping[str, Any]) -> None:
        if options is not self.options or "close" in scenario.__code__.co_names:
            super().run(scenario, options)
            return
        self.shared.begin_at(self.weights, FIRST)
        self.shared.run(self._scenario(scenario, self.shared.engine))

    async def _scenario(self, scenario: Scenario, engine: Engine) -> None:
        await scenario(engine)


@pytest.fixture
def world(models: list[Path], stopping: Path, shared: SharedEngine) -> World:
    return SharedWorld("vllm", options(models[0]), models[0], options(stopping), shared=shared)
