"""The processes that run a worker's verifiers episodes.

Invariants: when a runner ends, its sessions end at once and it is restarted. Neither a runner nor anything that it
started outlives the worker.
"""

import asyncio
import logging
import math
import os
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from rollq.buffer.common.child_processes import bare_python
from rollq.buffer.common.ending import cancel
from rollq.buffer.common.removing import remove_folder
from rollq.buffer.values.failures import FailureKind
from rollq.environments.verifiers.other_python import command, variables
from rollq.workers.gateway.harnesses import launcher
from rollq.workers.gateway.offers import Offers, Taker
from rollq.workers.gateway.open_sessions import Gateway, new_token
from rollq.workers.gateway.sessions.outcomes import Outcome

log = logging.getLogger(__name__)

PAUSES_S: Final = (1.0, 60.0)
"""The shortest and the longest pause before a runner is restarted; the pause doubles each time."""
LASTED_S: Final = 60.0
"""A runner that lived this long is restarted after the shortest pause."""
END_S: Final = 10.0
LAST_WORDS_S: Final = 0.5
LINES: Final = 20
MOST_FILE: Final = 2**62
"""The size limit for files, in bytes: in practice, there is none."""


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """The runner processes: their Python, their number, their total number of concurrent episodes, and which of the
    worker's environment variables they get."""

    taskset: str
    python: str
    runners: int
    concurrent: int
    variables: tuple[str, ...]


class Runners:
    """The runners of one task set, which share its sessions."""

    def __init__(self, gateway: Gateway, settings: RunnerSettings) -> None:
        self.offers = Offers()
        self._gateway, self._settings = gateway, settings
        self._keeping: list[asyncio.Task[None]] = []
        self._takers: dict[int, Taker] = {}  # of running runners
        self.pids: dict[int, int] = {}

    def start(self) -> None:
        """Start the runners, unless they are running."""
        if not self._keeping:
            self._keeping = [asyncio.create_task(self._keep(number)) for number in range(self._settings.runners)]

    async def close(self) -> None:
        """Stop the runners."""
        self.offers.end_waits()
        keeping, self._keeping = self._keeping, []
        await cancel(keeping)

    async def _keep(self, number: int) -> None:
        """Keep one runner running."""
        shortest_s, longest_s = PAUSES_S
        pause_s = shortest_s
        while True:
            begun_s = time.monotonic()
            try:
                reason = await self._run(number)
            except OSError as error:
                reason = f"cannot start: {error}"
            failure = Outcome(failure=(FailureKind.PROGRAM, f"the runner of verifiers {reason}"))
            taker = self._takers.pop(number, None)
            if taker is not None:
                taker.fail(failure)
            if not self._takers and not (taker is not None and taker.has_asked):
                self.offers.close_all(failure)  # no runner starts
            pause_s = shortest_s if time.monotonic() - begun_s > LASTED_S else min(2 * pause_s, longest_s)
            log.warning("a runner of verifiers for %s %s; restarting it", self._settings.taskset, reason)
            await asyncio.sleep(pause_s)

    async def _run(self, number: int) -> str:
        """Run a runner until it exits; return how it ended. Raises `OSError`."""
        settings, key, said = self._settings, new_token(), deque[str](maxlen=LINES)
        share = math.ceil(settings.concurrent / settings.runners)
        arguments = command(settings.python, "--gateway", self._gateway.url, "--concurrent", str(share))
        folder = tempfile.mkdtemp(prefix="rollq-runner-")
        taker = self._takers[number] = Taker(self.offers)
        with ExitStack() as stack:
            stack.callback(remove_folder, folder)
            stack.enter_context(self._gateway.admitting(key, taker))
            process = await asyncio.create_subprocess_exec(
                *bare_python(launcher.__name__, os.getpid(), folder, MOST_FILE, "", *arguments),
                stdin=PIPE,
                stdout=PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=variables(settings.variables) | {"TMPDIR": folder},
                start_new_session=True,
            )
            try:
                assert process.stdin is not None
                with suppress(ConnectionError):
                    process.stdin.write(f"{key}\n".encode())
                    await process.stdin.drain()
                self.pids[number] = process.pid
                listening = asyncio.create_task(_listen(process, said))
                code = await process.wait()
                await asyncio.wait([listening], timeout=LAST_WORDS_S)
                return _how_it_ended(code, said)
            finally:
                await _end(process)


async def _listen(process: Process, said: "deque[str]") -> None:
    """Log what the process writes, until it exits."""
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # longer than a buffer
            continue
        if not line:
            return
        if text := line.decode(errors="replace").rstrip():
            said.append(text)
            log.info("runner of verifiers: %s", text)


async def _end(process: Process) -> None:
    """Stop a runner and everything that it started, if it is running."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _how_it_ended(code: int, said: Sequence[str]) -> str:
    number = code - 128 if code > 128 else -code
    how = f"died of signal {number}" if number > 0 else f"ended with exit code {code}"
    return f"{how}: {said[-1]}" if said else how


_runners: WeakKeyDictionary[Gateway, dict[RunnerSettings, Runners]] = WeakKeyDictionary()


def runners_of(gateway: Gateway, settings: RunnerSettings) -> Runners:
    """The runners with these settings, shared by all tasks and evaluations of a worker."""
    return _runners.setdefault(gateway, {}).setdefault(settings, Runners(gateway, settings))
