"""Checks, without a model, that tasks' tests reward the solution and nothing else."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rollq.buffer.values.failures import SampleFailed
from rollq.environments.episodes import ENV
from rollq.environments.harbor.judge import TASK, AnyRunner, Runners, make_runners
from rollq.environments.harbor.rewards import total
from rollq.environments.harbor.running import SHOWN
from rollq.environments.harbor.tasks import SOLUTION, SOLVE, HarborTask
from rollq.environments.kinds import Finding, Level

AT_ONCE: Final = 2
TIMEOUT_S: Final = 600.0
"""The time limit for tasks that set none."""


def check(folder: Path, workdir: str, containers: bool, rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield the faults. Raises `ConfigError` if tests cannot be enclosed, or if the tasks' containers cannot be
    made."""
    tasks = [HarborTask(folder, row[ENV][TASK]) for row in rows]
    runners = make_runners(tasks, workdir, TIMEOUT_S, containers)
    yield from asyncio.run(_check(runners, tasks))


async def _check(runners: Runners, tasks: Sequence[HarborTask]) -> list[Finding]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def faults(row: int, task: HarborTask) -> list[Finding]:
        async with slots:
            runner = runners(task)
            found = [await _untouched(runner, task), *await _solved(runner, task)]
            return [Finding(level, f"{task.name}: {text}", row) for level, text in found if text]

    found = await asyncio.gather(*(faults(row, task) for row, task in enumerate(tasks)))
    return [finding for findings in found for finding in findings]


async def _untouched(runner: AnyRunner, task: HarborTask) -> tuple[Level, str]:
    """The fault of tests that reward an untouched workspace, or give it no reward at all."""
    folder = await runner.make(task)
    try:
        reward = total(await runner.rewards(task, folder))
    except SampleFailed as error:
        return Level.WARNING, f"an untouched workspace gets no reward, so such samples fail: {error}"
    finally:
        await runner.remove(folder)
    return Level.ERROR, f"an untouched workspace scores {reward:g}" if reward >= 1 else ""


async def _solved(runner: AnyRunner, task: HarborTask) -> list[tuple[Level, str]]:
    """The faults of a solution."""
    if not (task.path / SOLUTION / SOLVE).exists():
        return [(Level.WARNING, f"there is no {SOLUTION}/{SOLVE}, so nothing shows that its tests can pass")]
    folder = await runner.make(task)
    try:
        ended = await runner.solve(task, folder)
        if ended.code != 0:
            how = "takes too long" if ended.code is None else f"ends with exit code {ended.code}"
            return [(Level.ERROR, f"its solution {how}: {ended.output[-SHOWN:]}")]
        reward = total(await runner.rewards(task, folder))
    except (SampleFailed, OSError) as error:
        return [(Level.ERROR, f"its solution is not judged: {error}")]
    finally:
        await runner.remove(folder)
    return [] if reward == 1 else [(Level.ERROR, f"its solution scores {reward:g}, not 1")]
