"""The child processes that hold one class's environments: one live episode in each, or several for an isolated class.

Invariants: a process that dies or hangs is killed with all its descendants, and fails only its episodes. The next
episode gets another process. No process outlives this one. No process has a secret in its environment.
"""

import asyncio
import os
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final
from weakref import WeakKeyDictionary

import rollq
from rollq.buffer.common import exact_json
from rollq.workers.judging.environment import known_to_be_harmless

MAIN: Final = (
    "import sys; added = sys.argv[1:]; sys.path += added; "
    "from rollq.environments.text.child import serve; serve(len(added))"
)
LENGTH: Final = struct.Struct(">I")
IN_ISOLATION: Final = 16
"""How many episodes of an isolated class run in one process."""
TRIES: Final = 3


class ChildFailed(Exception):
    """A process could not start, or died. If `raised` is true, only its environment raised, so the process can be
    reused."""

    def __init__(self, reason: str, *, raised: bool = False) -> None:
        super().__init__(reason)
        self.raised = raised


@dataclass(frozen=True, slots=True)
class Place:
    """An environment's class and its Python (empty: this Python)."""

    path: str
    python: str = ""


class Child:
    """One process. `episodes` holds the numbers of its live episodes."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._lock = asyncio.Lock()
        self.episodes: set[int] = set()
        self.most = 1
        self.usable = True
        self.served = 0

    @classmethod
    async def start(cls, place: Place) -> "Child":
        """Start a process, and import the class in it. Raises `ChildFailed`."""
        folders = [os.path.dirname(folder) for folder in rollq.__path__]
        try:
            process = await asyncio.create_subprocess_exec(
                place.python or sys.executable,
                "-c",
                MAIN,
                *folders,
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,
                env=_variables(place),
            )
        except OSError as error:
            raise ChildFailed(f"{place.python or sys.executable} cannot be run: {error}") from error
        child = cls(process)
        try:
            begun = await child.ask("begin", path=place.path, replaces=not place.python, sys_path=_folders(place))
        except BaseException:
            await child.kill()
            raise
        child.most = IN_ISOLATION if begun["isolated"] else 1
        return child

    async def ask(self, do: str, **message: Any) -> dict[str, Any]:
        """The answer to a message. Raises `ChildFailed`; afterwards the process is unusable, unless `raised`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._lock:
            if not self.usable:
                raise ChildFailed("its process has ended")
            data = exact_json.dumps({"do": do, **message})
            try:
                self._process.stdin.write(LENGTH.pack(len(data)) + data)
                await self._process.stdin.drain()
                (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
                answer: dict[str, Any] = exact_json.loads(await self._process.stdout.readexactly(length))
            except (EOFError, ConnectionError) as error:
                raise ChildFailed(f"its process {await self._how_it_ended()}") from error
            except BaseException:  # a late answer would pass for the next answer
                self.usable = False
                raise
        if "error" in answer:
            failure = ChildFailed(answer["error"], raised=True)
            failure.add_note(f"In its process:\n{answer['trace']}")
            raise failure
        return answer

    async def kill(self) -> None:
        """Kill the process and all its descendants."""
        self.usable = False
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()

    async def _how_it_ended(self) -> str:
        await self.kill()
        code = self._process.returncode or 0
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class Children:
    """The processes for one class, in one event loop."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._all: set[Child] = set()
        self._numbers = count()
        self._most: int | None = None  # episodes in one process; None before the first
        self._starting = asyncio.Lock()

    async def open(self, options: Mapping[str, Any], seed: int) -> tuple[Child, int, list[dict[str, Any]]]:
        """Open an episode. Returns its process, number and opening. Raises `ChildFailed`."""
        for _ in range(TRIES):
            child, number = await self._take()
            fresh = not child.served
            child.served += 1
            try:
                opened = await child.ask("open", episode=number, options=options, seed=seed)
            except ChildFailed as error:
                await self.close(child, number)
                if fresh or error.raised:
                    raise
            except BaseException:
                await self.close(child, number)
                raise
            else:
                return child, number, opened["messages"]
        raise ChildFailed(f"{TRIES} processes died before the episode opened")

    async def close(self, child: Child, number: int) -> None:
        """Close an episode. A process that does not answer is killed, with the other episodes in it."""
        closed = False
        try:
            if child.usable:
                await child.ask("close", episode=number)
                closed = True
        except ChildFailed as error:
            closed = error.raised
        finally:
            child.episodes.discard(number)
            if not closed:
                self._all.discard(child)
                await child.kill()

    async def end(self) -> None:
        """Kill all processes."""
        children, self._all = self._all, set()
        for child in children:
            await child.kill()

    async def _take(self) -> tuple[Child, int]:
        """Return a process with room for an episode, and the episode's number."""
        number = next(self._numbers)
        child = self._with_room()
        if child is None and self._most != 1:  # the next process may have room for waiting episodes
            async with self._starting:
                child = self._with_room()
                if child is None and self._most != 1:
                    child = await self._start()
        if child is None:
            child = await self._start()
        child.episodes.add(number)
        return child, number

    def _with_room(self) -> Child | None:
        with_room = [child for child in self._all if child.usable and len(child.episodes) < child.most]
        return min(with_room, key=lambda each: len(each.episodes), default=None)

    async def _start(self) -> Child:
        child = await Child.start(self._place)
        self._most = child.most
        self._all.add(child)
        return child


_children: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Place, Children]] = WeakKeyDictionary()


def children_of(place: Place) -> Children:
    """The processes for a class, one pool for all episodes of the running event loop."""
    places = _children.setdefault(asyncio.get_running_loop(), {})
    return places.setdefault(place, Children(place))


async def end_children() -> None:
    """Kill all processes of the running event loop. A worker need not call this: its processes end with it."""
    for children in _children.pop(asyncio.get_running_loop(), {}).values():
        await children.end()


def _folders(place: Place) -> list[str]:
    """The entries of `sys.path` for a process: all for this Python; for another Python, the folders without installed
    packages."""
    if not place.python:
        return list(sys.path)
    installed = (sys.prefix, sys.base_prefix)
    return [folder for folder in sys.path if not folder.startswith(installed)]


def _variables(place: Place) -> dict[str, str]:
    variables = known_to_be_harmless(os.environ) | {"PYTHONHASHSEED": "0"}
    if place.python:
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            variables.pop(name, None)
    return variables
