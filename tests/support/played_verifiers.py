"""Episodes that real runners of verifiers play over a real gateway, with a model of given words."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from rollq.buffer.values.rollouts import FinishReason, Sample
from rollq.environments.trials import prompt_of
from rollq.environments.verifiers.kind import TaskSet, Verifiers
from rollq.environments.verifiers.loop import RunnerLoop
from rollq.workers.gateway.open_sessions import Gateway
from rollq.workers.groups.agent_loops import close_loop, make_loop
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import Model, rollout
from support.environment_pythons import ENVIRONMENTS, ROOT
from support.served_gateway import listening
from support.waiting import PATIENCE_S

TASK_SETS = ROOT / "tests" / "support" / "task_sets"
Words = Sequence[str | Sequence[int] | FinishReason]


def task_set(name: str = "rollq_sums", split: str = "train", **options: Any) -> TaskSet:
    return Verifiers().open(name, {"python": str(ENVIRONMENTS), "runners": 1, **options}, split)


def rows_of(made: TaskSet, count: int) -> list[dict[str, Any]]:
    rows = made.rows()
    try:
        return list(islice(rows, count))
    finally:
        rows.close()  # type: ignore[attr-defined]


@dataclass
class Playing:
    """A task set whose runners are started with the first episode."""

    gateway: Gateway
    loop: RunnerLoop
    tokenizer: HfTokenizer
    models: list[Model] = field(default_factory=list)

    async def play(self, row: dict[str, Any], words: Words, **lengths: Any) -> Sample:
        """The sample of a row with a model that says these words."""
        return await self.play_with(row, Model(self.tokenizer, words), **lengths)

    async def play_with(self, row: dict[str, Any], model: Model, **lengths: Any) -> Sample:
        self.models.append(model)
        made = rollout(model, prompt_of(row), **{"max_tokens": 4000, "max_prompt_tokens": 4000, **lengths})
        return await self.loop.run(replace(made, session=f"session/{len(self.models)}"))

    @property
    def launcher(self) -> int:
        """The process id of the first runner's launcher."""
        assert self.loop.runners is not None
        return self.loop.runners.pids[0]


@asynccontextmanager
async def playing(made: TaskSet, tokenizer: HfTokenizer, **options: Any) -> AsyncIterator[Playing]:
    settings = made.settings()
    async with listening() as (gateway, _):
        loop = make_loop(
            settings["agent_loop"], settings["agent_options"] | {"tool_parser": "hermes"} | options, gateway
        )
        assert isinstance(loop, RunnerLoop)
        try:
            yield Playing(gateway, loop, tokenizer)
        finally:
            await close_loop(loop)


async def all_of(*samples: Any) -> list[Sample]:
    return list(await asyncio.gather(*samples))


def run(work: Callable[[], Any]) -> None:
    """Run a coroutine within the time that only a test which hangs takes."""
    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))
