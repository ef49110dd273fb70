"""Runs a task's script in a container of the task's image, with the files that a command left there."""

import asyncio
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.environments.harbor.rewards import MOST_BYTES, NAMES, TEXT, Rewards
from rollq.environments.harbor.running import LOGS, VERIFIER, Ended, rewards_of, run_until
from rollq.environments.harbor.tasks import SOLUTION, SOLVE, TEST, TESTS, HarborTask
from rollq.workers.gateway.harnesses.containers import Container, ContainerError
from rollq.workers.gateway.harnesses.process import HarnessFolder

MOST_PROCESSES: Final = 1000


@dataclass(frozen=True, slots=True)
class ContainerRunner:
    """Runs tests and solutions in containers. `timeout_s` is for tasks without a limit."""

    program: str
    timeout_s: float

    async def make(self, task: HarborTask) -> HarnessFolder:
        """Start a new container for the task, and return the container's folder. Raises `ContainerError`."""
        folder = await asyncio.to_thread(HarnessFolder.make, None)
        try:
            await asyncio.to_thread(self._container(folder).start, task.image(), MOST_PROCESSES, self.timeout_s)
        except BaseException:
            await self.remove(folder)
            raise
        return folder

    async def remove(self, folder: HarnessFolder) -> None:
        """Remove a folder and its container."""
        await asyncio.to_thread(self._container(folder).remove)
        await asyncio.to_thread(folder.remove)

    async def rewards(self, task: HarborTask, folder: HarnessFolder) -> Rewards:
        """End a container's processes, and return the tests' rewards for it. Raises `SampleFailed`."""
        settings, container = task.settings().verifier, self._container(folder)
        limit_s = settings.timeout_sec or self.timeout_s
        own = await asyncio.to_thread(HarnessFolder.make, None)
        try:
            ended = await self._run(container, own, task.path / TESTS, f"/{TESTS}/{TEST}", settings.env, limit_s)
            logs = await asyncio.to_thread(_fetch_logs, container, own.temporary)
            return rewards_of(ended, logs)
        except OSError as error:
            raise SampleFailed(FailureKind.SANDBOX, f"the tests cannot start: {error}") from error
        except ValueError as error:
            raise SampleFailed(FailureKind.GRADER, str(error)) from error
        finally:
            await asyncio.shield(asyncio.to_thread(own.remove))

    async def solve(self, task: HarborTask, folder: HarnessFolder) -> Ended:
        """Run the task's own solution in a container. Raises `OSError`."""
        settings, script = task.settings(), f"/{SOLUTION}/{SOLVE}"
        limit_s = settings.agent.timeout_sec or self.timeout_s
        own = await asyncio.to_thread(HarnessFolder.make, None)
        try:
            source = task.path / SOLUTION
            return await self._run(self._container(folder), own, source, script, settings.solution.env, limit_s)
        finally:
            await asyncio.shield(asyncio.to_thread(own.remove))

    def _container(self, folder: HarnessFolder) -> Container:
        return Container(self.program, folder.root)

    async def _run(
        self,
        container: Container,
        own: HarnessFolder,
        source: Path,
        script: str,
        variables: Mapping[str, str],
        limit_s: float,
    ) -> Ended:
        """Copy a folder into the root folder, and run a script from it, with the script's output in the folder
        `own`."""
        await asyncio.to_thread(_place, container, own, source)
        command, environment = container.command(["bash", script], variables)
        return await run_until(command, own, environment, limit_s)


def _place(container: Container, own: HarnessFolder, source: Path) -> None:
    """End all processes, and copy a folder to a clean place, beside an empty folder for rewards."""
    copy = own.workspace / source.name
    shutil.copytree(source, copy)
    container.stop()
    container.start_again()
    places = f"rm -rf /{source.name} {LOGS}/{VERIFIER} && {{ [ ! -L {LOGS} ] || rm {LOGS}; }}"
    container.run("sh", "-c", f"{places} && mkdir -p {LOGS}/{VERIFIER} && chmod 777 {LOGS}/{VERIFIER}")
    container.copy_in(copy, f"/{source.name}")


def _fetch_logs(container: Container, to: Path) -> Path:
    """Copy the rewards out, into a new folder. Raises `ValueError` for anything but small files."""
    logs = to / VERIFIER
    logs.mkdir()
    with suppress(ContainerError):  # it has ended without rewards
        for name in (TEXT, NAMES):
            if (content := container.content(f"{LOGS}/{VERIFIER}/{name}", MOST_BYTES)) is not None:
                (logs / name).write_bytes(content)
    return logs
