"""Processes for judges that need the CPU: calls do not block the event loop, and a call that hangs or dies affects no
other call.

Each process has separate pipes and runs one call at a time. Calls and answers are JSON and frames of
`rollq.buffer.wire.frame_format`; nothing is pickled, and only this process's configuration names functions. Invariant:
if a process fails in any way (killed after a timeout or from outside, crashed, confused by a judge), the next call gets
a working process. No process has a secret of the worker in its environment: see `known_to_be_harmless`.

Processes for code that a model may have written are sealed; see `sealed_main`.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import orjson

from rollq.buffer.common import exact_json
from rollq.buffer.common.sealing.process import Means
from rollq.buffer.errors import RollqError
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.workers.judging.environment import check_named, known_to_be_harmless
from rollq.workers.judging.process_main import HEAD, LENGTH, MAX_TRACE, how_it_ended
from rollq.workers.judging.rewards import Answer, Credit, InvalidReward
from rollq.workers.user_code.errors import shown

MAIN = "import sys; sys.path[:] = sys.argv[1:]; from rollq.workers.judging.process_main import serve; serve()"
SEALED_MAIN = (
    "import sys; given = [one.split() for one in sys.argv[1:3]]; sys.path[:] = sys.argv[3:]; "
    "from rollq.workers.judging.sealed_main import serve; serve(*given)"
)
SAME_ORDER: Final = {"PYTHONHASHSEED": "0"}
"""Environment variables for all processes: they give sets, and judges' results from sets, the same order everywhere."""
ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment variables for sealed processes: they keep imported libraries from starting threads."""
BEGIN_S = 120.0
"""How many seconds a process may take to start and to import the function."""
BEGIN_TRIES = 3


class JudgeFailed(RollqError):
    """A judge in a separate process ended without a reward. A note on the exception has the traceback."""


class NotStarted(Exception):
    """The process ended before the call started, such as while it was idle."""


@dataclass(frozen=True, slots=True)
class Seal:
    """How processes are sealed: they import `modules`, then use the first of `means` that works."""

    modules: tuple[str, ...]
    means: tuple[Means, ...]


class JudgePool:
    """Up to `count` processes, each started at its first use."""

    def __init__(self, count: int, variables: Sequence[str] = (), *, seal: Seal | None = None) -> None:
        """`variables` names environment variables for the processes, in addition to the harmless ones.

        Raises `ConfigError` for a variable that is not set in this process.
        """
        check_named(variables)
        self._count = count
        self._variables = tuple(variables)
        self._seal = seal
        self._slots = asyncio.Semaphore(count)
        self._all: set[JudgeProcess] = set()
        self._idle: list[JudgeProcess] = []
        self._sealed: dict[Seal, JudgePool] = {}

    def sealed(self, *modules: str, means: Sequence[Means] = tuple(Means)) -> "JudgePool":
        """A pool with the same number of processes, which can only compute. A call can read only Python's files, and
        write none. It cannot start a process, or reach another process or a socket. It finds nothing that an earlier
        call left. The pool closes with this one.

        `modules` are imported first, with all rights; later imports must be installed packages. If the system supports
        none of `means`, each call raises `JudgeFailed`; see `rollq.buffer.common.sealing.probe`.
        """
        seal = Seal(modules, tuple(means))
        return self._sealed.setdefault(seal, JudgePool(self._count, seal=seal))

    async def call(
        self,
        function: Callable[..., Answer],
        *args: Any,
        blob: bytes = b"",
        timeout_s: float,
        before: tuple[Callable[..., object], Sequence[Any]] | None = None,
    ) -> Answer:
        """Return the answer of `function(*args)`, or of `function(*args, blob)`: one number, named parts or a credit.

        The function is at a module's top level, and `args` can be written as JSON. If a call is cancelled or takes
        longer than `timeout_s`, its process group is killed. Raises `SampleFailed` if the function
        raises it, `JudgeFailed` if the function raises anything else or its process dies, `InvalidReward` if it returns
        anything but a reward, `TimeoutError`, and `TypeError` for arguments that are not JSON.

        `before` has a function and arguments to call first, outside `timeout_s`, to fill caches. In sealed processes,
        only the effects of `before` last from one call to the next, so it must never see a model's text.
        """
        first = before and [before[0].__module__, before[0].__qualname__, before[1]]
        call = exact_json.dumps([function.__module__, function.__qualname__, args, timeout_s, first])
        message = HEAD.pack(len(call), len(blob)) + call + blob
        async with self._slots:
            for _ in range(BEGIN_TRIES):
                process = self._idle.pop() if self._idle else await self._start()
                try:
                    answer = await process.ask(message, timeout_s + BEGIN_S if self._seal else timeout_s)
                except NotStarted:
                    await self._end(process)
                except BaseException:
                    await self._end(process)
                    raise
                else:
                    self._idle.append(process)
                    return _read(answer)
        raise JudgeFailed(f"{BEGIN_TRIES} processes died before the call started")

    async def close(self) -> None:
        """Kill the processes."""
        self._idle.clear()
        for process in list(self._all):
            await self._end(process)
        for sealed in self._sealed.values():
            await sealed.close()

    async def _start(self) -> "JudgeProcess":
        environment = known_to_be_harmless(os.environ, self._variables) | SAME_ORDER
        if self._seal:
            environment |= ONE_THREAD
            command = ["-c", SEALED_MAIN, " ".join(self._seal.modules), " ".join(self._seal.means)]
        else:
            command = ["-c", MAIN]
        process = JudgeProcess(
            await asyncio.create_subprocess_exec(
                sys.executable, *command, *sys.path, stdin=PIPE, stdout=PIPE, start_new_session=True, env=environment
            )
        )
        self._all.add(process)
        return process

    async def _end(self, process: "JudgeProcess") -> None:
        self._all.discard(process)
        await process.kill()


class JudgeProcess:
    """One child process, running one call at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def ask(self, message: bytes, timeout_s: float) -> bytes:
        """The answer to a call. If this raises, the process must be killed."""
        started = False
        try:
            async with asyncio.timeout(BEGIN_S):
                assert self._process.stdin is not None
                self._process.stdin.write(message)
                await self._process.stdin.drain()
                answer = await self._read()
            if answer:
                return answer
            started = True
            async with asyncio.timeout(timeout_s):
                return await self._read()
        except TimeoutError as error:
            reason = f"took longer than {timeout_s:g} s" if started else f"did not start within {BEGIN_S:g} s"
            raise TimeoutError(reason) from error
        except (EOFError, ConnectionError) as error:
            if not started:
                raise NotStarted from error
            raise JudgeFailed(f"its process {await self._how_it_ended()}") from error

    async def kill(self) -> None:
        """Kill the process and its process group."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _read(self) -> bytes:
        assert self._process.stdout is not None
        (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        return await self._process.stdout.readexactly(length)

    async def _how_it_ended(self) -> str:
        await self.kill()
        return how_it_ended(self._process.returncode or 0)


def _read(answer: bytes) -> Answer:
    """Read a judge's answer. Its bytes are untrusted: a model may have written them."""
    try:
        result = orjson.loads(answer)
        if "error" not in result:
            reward: Answer = Credit(**result) if "tokens" in result else result["reward"]
            return reward
        failure = _error(result)
    except (ValueError, TypeError, KeyError) as error:
        raise JudgeFailed("its process wrote something other than an answer") from error
    raise failure


def _error(result: dict[str, Any]) -> Exception:
    reason, trace = shown(str(result["error"])), shown(str(result["trace"]), MAX_TRACE)
    if result.get("late"):
        return TimeoutError(reason)
    error: Exception
    if "kind" in result:
        error = SampleFailed(FailureKind(result["kind"]), reason)
    else:
        error = JudgeFailed(reason) if result["raised"] else InvalidReward(reason)
    error.add_note(f"In its process:\n{trace}")
    return error
