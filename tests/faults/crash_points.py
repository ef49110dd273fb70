"""Kills a role before and after each of its Redis calls, one after the other, and checks what the others find.

A scenario prepares a run once. For each point its state is restored, the role runs through a proxy that kills it at one
command, and the run is finished without faults: a point without a violation is one at which that role may die.
"""

import itertools
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import redis

from faults.checker import Rules, check
from faults.dump import dump_run
from faults.history import read_histories
from faults.payloads import collect, payload_folder
from faults.processes import Role
from faults.saved_store import SavedStore
from rollq.buffer.store.embedded_server import EmbeddedServer
from support.proxy import PASS, Fate, Proxy, Verdict, function_of, name_of
from support.waiting import PATIENCE_S, wait_until

Side = Literal["before", "after"]
SIDES: tuple[Side, ...] = ("before", "after")


class Fuse:
    """A proxy's judge that kills `role` at one command, before or after the server runs it.

    `only` are the functions whose calls count; without any, every command counts.
    """

    def __init__(self, at: int, side: Side, only: Collection[str] = ()) -> None:
        self.role: Role | None = None
        self.blown_at = ""
        self.seen: list[str] = []
        self._at = at
        self._only = only
        self._fate = Fate.LOSE if side == "before" else Fate.DROP

    def __call__(self, command: bytes) -> Verdict:
        if self.blown_at:
            return Verdict(Fate.LOSE)  # sent by a process that is dead by now
        name = function_of(command) or name_of(command).decode()
        if self._only and name not in self._only:
            return PASS
        self.seen.append(name)
        if len(self.seen) <= self._at:
            return PASS
        self.blown_at = self.seen[-1]
        while self.role is None or not self.role.alive:
            time.sleep(0.001)  # it has connected before its starter knows its pid
        self.role.send(signal.SIGKILL)
        return Verdict(self._fate)


class Stage:
    """A run that scenarios play on: its server, its folder, and a copy of both as they were when it was prepared."""

    def __init__(self, server: EmbeddedServer, folder: Path) -> None:
        assert server.port is not None
        self.url, self.port, self.run = server.url, server.port, "crash"
        self.folder = folder / "run"
        self.folder.mkdir(parents=True)
        self._copy = folder / "copy"
        client = redis.Redis.from_url(server.url)
        client.flushall()
        self._store = SavedStore(client)

    def keep(self) -> None:
        """Remember the present state of store and folder."""
        self._store.keep()
        shutil.copytree(self.folder, self._copy)

    def restore(self) -> None:
        """Go back to the state that `keep` remembers."""
        shutil.rmtree(self.folder)
        shutil.copytree(self._copy, self.folder)
        self._store.restore()

    def violations(self, threshold: int) -> list[str]:
        """What the checker finds now."""
        collect(self.url, self.run, self.folder)
        dump = dump_run(self.url, self.run, payload_folder(self.folder))
        found = check(read_histories(self.folder / "history"), dump, Rules(threshold))
        return [f"{violation.invariant}: {violation.message}" for violation in found]


@dataclass(frozen=True)
class Scenario:
    """A role in a situation. `start` starts it behind a proxy's URL, with those that it needs; the fused role is first.

    `prepare` makes the situation. `finish` does what the others do after the crash, until nothing is left to do, and
    returns what it finds wrong. `ended`: whether an unharmed role has done its part and may be stopped. `only`: the
    functions at whose calls the role dies; all of its commands without any.
    """

    name: str
    prepare: Callable[[Stage], None]
    start: Callable[[Stage, str], Sequence[Role]]
    finish: Callable[[Stage], list[str]]
    ended: Callable[[Stage], bool] | None = None
    threshold: int = 2
    only: Collection[str] = ()


class Point(NamedTuple):
    """One crash: at which command, on which side of it, and what was wrong afterwards."""

    scenario: str
    number: int
    side: Side
    command: str
    problems: Sequence[str]


@dataclass
class Coverage:
    """The crash points of a scenario."""

    scenario: str
    points: list[Point] = field(default_factory=list)
    calls: int = 0
    commands: set[str] = field(default_factory=set)

    @property
    def failures(self) -> list[Point]:
        """The points at which something was wrong."""
        return [point for point in self.points if point.problems]


def crash_everywhere(
    scenario: Scenario, server: EmbeddedServer, folder: Path, numbers: Iterable[int] = itertools.count()
) -> Coverage:
    """Crash before and after the calls with these numbers, until the role survives. Empties the server."""
    stage = Stage(server, folder)
    scenario.prepare(stage)
    stage.keep()
    coverage = Coverage(scenario.name)
    for number in numbers:
        for side in SIDES:
            fuse = Fuse(number, side, scenario.only)
            problems = _crash(scenario, stage, fuse)
            coverage.commands |= set(fuse.seen)
            if fuse.blown_at or problems:
                coverage.points.append(Point(scenario.name, number, side, fuse.blown_at or "no crash", problems))
            if not fuse.blown_at:
                coverage.calls = number
                return coverage
    return coverage


def _crash(scenario: Scenario, stage: Stage, fuse: Fuse) -> list[str]:
    """Run the role up to its crash, or to its end, and then everything else; returns what is wrong."""
    stage.restore()
    with Proxy(stage.port, fuse) as proxy:
        roles = scenario.start(stage, proxy.url)
        fuse.role = roles[0]
        wait_until(lambda: not roles[0].alive or _over(scenario, stage, fuse))
        for role in roles:
            role.send(signal.SIGKILL if fuse.blown_at else signal.SIGTERM)
        for role in roles:
            assert role.wait(PATIENCE_S), f"{role.name} does not stop"
        if fuse.blown_at:
            wait_until(lambda: proxy.broken > 0)
    return scenario.finish(stage) + stage.violations(scenario.threshold)


def _over(scenario: Scenario, stage: Stage, fuse: Fuse) -> bool:
    return not fuse.blown_at and scenario.ended is not None and scenario.ended(stage)
