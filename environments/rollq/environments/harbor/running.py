"""Runs a task's script in a workspace: enclosed, with a time limit, and with the files at Harbor's paths."""

import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.environments.harbor.copying import TooLarge, copy_workspace
from rollq.environments.harbor.rewards import Rewards, read_rewards
from rollq.environments.harbor.tasks import FILES, SOLUTION, SOLVE, TEST, TESTS, HarborTask
from rollq.workers.gateway.harnesses.enclosure import CANNOT, Enclosure
from rollq.workers.gateway.harnesses.launcher import NOT_FOUND
from rollq.workers.gateway.harnesses.local import repositories_above, secret_files
from rollq.workers.gateway.harnesses.process import HarnessFolder, HarnessProcess
from rollq.workers.judging.rewards import SCORE

LOGS: Final = "/logs"
VERIFIER: Final = "verifier"
"""The folder in `LOGS` for the tests' reward."""
FILE_BYTES: Final = 256_000_000
"""The size limit for a file and for temporary folders, in bytes."""
SHOWN: Final = 500
TIMED_OUT: Final = "tests_timed_out"
"""The fact that a sample's reward is 0 because its tests took too long."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A script that has ended: its exit code, or None after a timeout, and the end of its output."""

    code: int | None
    output: str


def rewards_of(ended: Ended, folder: Path) -> Rewards:
    """The rewards that tests wrote to a folder. Raises `SampleFailed`."""
    said = f": {ended.output[-SHOWN:]}" if ended.output else ""
    if ended.code is None:
        return {SCORE: 0.0, TIMED_OUT: 1.0}
    if ended.code in (CANNOT, NOT_FOUND) and not any(folder.iterdir()):
        raise SampleFailed(FailureKind.SANDBOX, f"the tests cannot start{said}")
    try:
        return {**read_rewards(folder), TIMED_OUT: 0.0}
    except ValueError as error:
        raise SampleFailed(FailureKind.GRADER, f"{error} (exit code {ended.code}){said}") from error


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs tasks' tests and solutions with the workspace at the path `place`. `timeout_s` is for tasks without a
    limit."""

    place: str
    timeout_s: float

    async def make(self, task: HarborTask) -> HarnessFolder:
        """A folder with the task's files. Raises `OSError`."""
        return await asyncio.to_thread(HarnessFolder.make, task.path / FILES)

    async def remove(self, folder: HarnessFolder) -> None:
        """Remove a folder."""
        await asyncio.to_thread(folder.remove)

    async def rewards(self, task: HarborTask, folder: HarnessFolder) -> Rewards:
        """The tests' rewards for a copy of a workspace, after its command has ended. Raises `SampleFailed`."""
        copy = await asyncio.to_thread(HarnessFolder.make, None)
        try:
            return await self._rewards(task, folder, copy)
        finally:
            await asyncio.shield(asyncio.to_thread(copy.remove))

    async def _rewards(self, task: HarborTask, left: HarnessFolder, folder: HarnessFolder) -> Rewards:
        settings = task.settings().verifier
        limit_s = settings.timeout_sec or self.timeout_s
        try:
            await asyncio.to_thread(copy_workspace, left.workspace, folder.workspace, self.place)
            logs = Path(tempfile.mkdtemp(prefix="logs-", dir=folder.root))
            (logs / VERIFIER).mkdir()
            places = {TESTS: task.path / TESTS}
            ended = await self._run(task, folder, f"/{TESTS}/{TEST}", places, {LOGS: logs}, settings.env, limit_s)
        except TooLarge as error:
            raise SampleFailed(FailureKind.PROGRAM, str(error)) from error
        except OSError as error:
            raise SampleFailed(FailureKind.SANDBOX, f"the tests cannot start: {error}") from error
        return rewards_of(ended, logs / VERIFIER)

    async def solve(self, task: HarborTask, folder: HarnessFolder) -> Ended:
        """Run the task's own solution in a workspace. Raises `OSError`."""
        settings, limit = task.settings(), task.settings().agent.timeout_sec or self.timeout_s
        places = {SOLUTION: task.path / SOLUTION}
        return await self._run(task, folder, f"/{SOLUTION}/{SOLVE}", places, {}, settings.solution.env, limit)

    async def _run(
        self,
        task: HarborTask,
        folder: HarnessFolder,
        script: str,
        copied: Mapping[str, Path],
        shown: Mapping[str, Path],
        variables: Mapping[str, str],
        limit_s: float,
    ) -> Ended:
        """Run a script with `copied` folders below /, beside `shown` folders, which are not copied."""
        places = {self.place: folder.workspace, **shown}
        for name, source in copied.items():
            copy = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder.root))
            await asyncio.to_thread(shutil.copytree, source, copy, dirs_exist_ok=True)
            places[f"/{name}"] = copy
        enclosure = Enclosure(
            root=str(folder.root),
            hidden=(*secret_files(), str(task.folder.resolve()), *repositories_above(task.folder)),
            places=tuple((str(source), path) for path, source in places.items()),
            most_bytes=FILE_BYTES,
        )
        command = ["bash", "-c", 'cd "$0" && exec bash "$1"', self.place, script]
        home = {"HOME": str(folder.temporary), **variables}  # not the workspace: programs read settings there
        return await run_until(command, folder, home, limit_s, enclosure)


async def run_until(
    command: Sequence[str],
    folder: HarnessFolder,
    variables: Mapping[str, str],
    limit_s: float,
    enclosure: Enclosure | None = None,
) -> Ended:
    """Run a command in a folder, and end it after `limit_s`. Raises `OSError`."""
    process = await HarnessProcess.start(
        command, folder, variables, b"", max_file_bytes=FILE_BYTES, enclosure=enclosure
    )
    try:
        code = await asyncio.wait_for(process.wait(), limit_s)
    except TimeoutError:
        code = None
    finally:
        await process.end()
    return Ended(code, folder.tail())
