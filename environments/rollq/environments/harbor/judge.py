"""The judge for tasks in Harbor's layout: runs a task's tests in the workspace after the agent's command."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import Settings
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import Prompt, Sample
from rollq.environments.episodes import ENV
from rollq.environments.harbor.containers import ContainerRunner
from rollq.environments.harbor.images import make_images, require_program
from rollq.environments.harbor.running import Runner
from rollq.environments.harbor.tasks import HarborTask, tasks_in
from rollq.workers.gateway.harnesses.enclosure import Enclosure, problem
from rollq.workers.gateway.harnesses.process import HarnessFolder
from rollq.workers.judging.builtin import BuiltInJudge
from rollq.workers.judging.judge import Judge, JudgeContext
from rollq.workers.judging.rewards import Answer
from rollq.workers.user_code.calls import UserFunction

TASK: Final = "task"
"""The name of a row's task in its `env`."""


class TestsOptions(Settings):
    """Options of the judge, which `env` sets."""

    folder: Path = Field(description="the folder of tasks")
    split: str = Field(description="which of its splits")
    workdir: str = Field(description="the path where tests see the workspace")
    containers: bool = Field(description="whether tasks with an image run in containers")


AnyRunner = Runner | ContainerRunner
Runners = Callable[[HarborTask], AnyRunner]


class TestsJudge:
    """Runs tests, at most one at a time per processor."""

    def __init__(self, tasks: tuple[HarborTask, ...], runners: Runners) -> None:
        self._tasks = {task.name: task for task in tasks}
        self._runners = runners
        self._slots = asyncio.Semaphore(os.cpu_count() or 1)

    async def judge(self, prompt: Prompt, sample: Sample) -> Answer:
        """The rewards of the tests. Raises `SampleFailed`."""
        row: Any = prompt.metadata.get(ENV)
        task = self._tasks.get(str(row.get(TASK))) if isinstance(row, dict) else None
        if task is None:
            raise SampleFailed(FailureKind.PROMPT, f"the row's {ENV} is {row!r:.80}, which is not a task of the folder")
        workspace = sample.extra.get("harness", {}).get("workspace")
        if workspace is None:
            raise SampleFailed(
                FailureKind.PROGRAM, 'the sample has no workspace: leave agent_loop as env sets it, "harness"'
            )
        async with self._slots:
            return await self._runners(task).rewards(task, HarnessFolder(Path(workspace).parent))


def require_enclosure(env: str) -> None:
    """Raise `ConfigError` if commands could read the tests, or change files that the tests judge."""
    folder = HarnessFolder.make(None)
    try:
        found = problem(Enclosure(str(folder.root), places=((str(folder.workspace), "/app"),)))
    finally:
        folder.remove()
    if found:
        raise ConfigError(
            f'env = "{env}" needs Linux namespaces, which hide tests and solutions from commands, but this system '
            f"has none ({found}); see Agents on the guide's page Security"
        )


def make_runners(tasks: Sequence[HarborTask], workdir: str, timeout_s: float, containers: bool) -> Runners:
    """The runner of each task, once images are made. Raises `ConfigError`."""
    contained = {task.name: task for task in tasks if containers and task.has_image()}
    enclosed, in_container = Runner(workdir, timeout_s), None
    if len(contained) < len(tasks):
        require_enclosure(f"harbor:{tasks[0].folder}")
    if contained:
        program = require_program(next(iter(contained.values())))
        make_images(program, contained.values())
        in_container = ContainerRunner(program, timeout_s)
    return lambda task: in_container if in_container and task.name in contained else enclosed


def make_judge(settings: TestsOptions, context: JudgeContext) -> Judge:
    """The judge for one folder of tasks. Raises `ConfigError`."""
    tasks = tasks_in(settings.folder, settings.split)
    judge = TestsJudge(tasks, make_runners(tasks, settings.workdir, context.timeout_s, settings.containers))
    return Judge("harbor", UserFunction.wrap(judge.judge, None, quick=False))


JUDGE: Final = BuiltInJudge(TestsOptions, make_judge)
"""The judge that `env = "harbor:..."` names."""
