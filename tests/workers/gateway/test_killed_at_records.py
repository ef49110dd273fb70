"""Agents over the gateway while a worker, an engine, a server or an agent is killed, exactly before or after a call is
recorded: what an agent has seen is never lost, and never sampled again.

A proxy between worker and server sees each `record`. The slow tests kill at every call of a session.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.values.rollouts import Sample, Status
from support import plain_agent
from support.calling_engine import CALLS, ENGINE
from support.chat_engine import call, chat_tokenizer
from support.killed_agents import agents_of, rules
from support.power_cut import kill_synced
from support.proxy import PASS, Fate, Proxy, Verdict, function_of
from support.waiting import wait_until
from support.worker_processes import Workers
from support.worker_run import WorkerWorld

ESCAPE_S = 0.1
"""Time for an answer to reach an agent that does not wait for its record, as it must."""
Place = tuple[int, str]
"""A turn, and the side of its record on which something is killed: "before" or "after"."""


def places(victim: str) -> pytest.MarkDecorator:
    """Two places of a session, and in the slow tests all."""
    turns = random.Random(victim).sample(range(CALLS), 2)
    given = [pytest.param(tuple(sorted(zip(turns, ("before", "after"), strict=True))), id="some")]
    for side in ("before", "after"):
        given.append(pytest.param(tuple((turn, side) for turn in range(CALLS)), id=side, marks=pytest.mark.slow))
    return pytest.mark.parametrize("places", given)


@dataclass
class Fuse:
    """A proxy's judge that calls `kill` at the records of some turns: before the server gets one, or after it has
    run it, and before the worker hears of that. `breaks` says whether the connection ends with the victim."""

    notes: Path
    places: set[Place]
    breaks: bool
    kill: Callable[[], None] = lambda: None
    blown: int = 0

    def __call__(self, command: bytes) -> Verdict:
        if function_of(command) != "record":
            return PASS
        turn = int(self.notes.read_text().split()[-1])
        if (turn, "before") in self.places:
            self.places.remove((turn, "before"))
            time.sleep(ESCAPE_S)
            self._blow()
            return Verdict(Fate.LOSE) if self.breaks else PASS
        if (turn, "after") in self.places:
            self.places.remove((turn, "after"))
            return Verdict(Fate.DROP if self.breaks else Fate.PASS, then=self._blow)
        return PASS

    def _blow(self) -> None:
        self.kill()
        self.blown += 1


@dataclass
class Scene:
    """A worker with an agent, whose commands to the server pass a fuse."""

    buffer: Buffer
    server: EmbeddedServer
    folder: Path
    stack: ExitStack
    places: Collection[Place]
    breaks: bool
    rules: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        folder = self.folder
        self.tokenizer, self.notes, self.agent = chat_tokenizer(folder / "model"), folder / "notes", folder / "agent.py"
        self.agent.write_text('print("begun", flush=True)\n' + Path(plain_agent.__file__).read_text())
        self.seen = folder / "seen"
        self.seen.mkdir()
        self.fuse = Fuse(self.notes, set(self.places), self.breaks)
        assert self.server.port is not None
        self.proxy = self.stack.enter_context(Proxy(self.server.port, self.fuse))
        options = {"env": {"SEEN": str(self.seen)}, "concurrent": 1, "writable": [str(self.seen)]}
        task = {**rules(sys.executable, str(self.agent), **options), **self.rules}
        self.world = WorkerWorld(self.buffer, self.server.url, task)
        self.world.url = self.proxy.url  # of its workers
        self.workers = Workers(self.world, self.stack, folder)

    def start(self) -> BaseProcess:
        return self.workers.start(ENGINE, model=self.folder / "model", notes=self.notes)

    def end_worker(self, worker: BaseProcess) -> None:
        """Do what follows when a worker was killed: its connections and agents end, and its group goes back."""
        worker.join()
        assert self.server.port is not None
        self.proxy.redirect(self.server.port)  # else it still waits for the worker's next ticket
        self.workers.kill(worker)
        wait_until(lambda: not agents_of(self.folder))

    def kill_engine(self) -> None:
        os.kill(int(self.notes.with_suffix(".pid").read_text()), signal.SIGKILL)

    def kill_agent(self) -> None:
        (agent,) = agents_of(self.folder)
        os.kill(agent, signal.SIGKILL)

    def kill_server(self) -> None:
        with suppress(AssertionError):  # the last write was not synced in time: `stop` syncs it
            kill_synced(self.server, self.buffer.client)

    def until_blown(self, times: int) -> None:
        self.workers.until(lambda: self.fuse.blown == times)

    def until_completed(self, groups: int) -> None:
        self.workers.until(lambda: self.world.count(Status.COMPLETED) == groups)

    def check(self, *, sampled_again: Sequence[int], replayed: int) -> None:
        """The group completed once. Each turn was sampled once, but for those `sampled_again`. Every answer that an
        agent has seen is in the sample, and the last attempt took `replayed` ones from the record."""
        (sample,) = self.workers.result()
        made = Counter(map(int, self.notes.read_text().split()))
        assert made == Counter([*range(CALLS), *sampled_again])
        for answers in self.answers():
            assert answers == self.answers_in(sample)[: len(answers)]
        assert (sample.reward, sample.extra["harness"]["exit_code"]) == (1.0, 0)
        assert sample.extra.get("replayed_calls", 0) == replayed
        assert self.completed == 1

    @property
    def completed(self) -> int:
        """How often a group was completed."""
        assert not self.fuse.places
        return int(self.buffer.counts("math").progress["produced"])

    def answers(self) -> list[list[str]]:
        """What each process of an agent has seen."""
        return [[text_of(json.loads(line)) for line in file.read_text().splitlines()] for file in self.seen.iterdir()]

    def answers_in(self, sample: Sample) -> list[str]:
        """The answers in the only segment of a sample."""
        (segment,) = sample.segments
        assert segment.loss_mask is not None
        text = self.tokenizer.decode(segment.response_ids[segment.loss_mask].tolist(), special=True)
        return text.removesuffix("<eos>").split("<eos>")


def text_of(message: dict[str, Any]) -> str:
    """An answer of `CallingEngine`, as its model wrote it."""
    if "tool_calls" not in message:
        return str(message["content"])
    (made,) = message["tool_calls"]
    return call(made["function"]["name"], **json.loads(made["function"]["arguments"]))


@places("worker")
def test_a_worker_that_is_killed_before_or_after_a_record(
    places: Sequence[Place], buffer: Buffer, server: EmbeddedServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        scene = Scene(buffer, server, tmp_path, stack, places, breaks=True)
        scene.world.admit(1)
        for kills in range(len(places)):
            worker = scene.start()
            scene.fuse.kill = worker.kill
            scene.until_blown(kills + 1)
            scene.end_worker(worker)
            scene.world.publish(kills + 1)
        scene.start()
        last, side = places[-1]
        again = [turn for turn, side in places if side == "before"]
        scene.check(sampled_again=again, replayed=last + (side == "after"))


@places("engine")
def test_an_engine_that_is_killed_before_or_after_a_record(
    places: Sequence[Place], buffer: Buffer, server: EmbeddedServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        scene = Scene(buffer, server, tmp_path, stack, places, breaks=False)
        scene.fuse.kill = scene.kill_engine
        scene.world.admit(1)
        scene.start()
        found = [turn for turn, _ in places if turn < CALLS - 1]  # nobody misses the engine after the last turn
        for deaths in range(len(found)):
            scene.until_blown(deaths + 1)
            scene.workers.until(lambda: scene.world.count(Status.PENDING) == 1)
            scene.world.tickets(1)  # as the producer does for groups that went back
        scene.check(sampled_again=(), replayed=found[-1] + 1)


@places("server")
def test_a_server_that_is_killed_before_or_after_a_record(places: Sequence[Place], tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "server") as server, ExitStack() as stack:
        buffer = stack.enter_context(Buffer.connect(server.url, "sums"))
        buffer.wait_out_outages()
        scene = Scene(buffer, server, tmp_path, stack, places, breaks=True, rules={"lease_s": 600})
        scene.fuse.kill = scene.kill_server
        scene.world.admit(1)
        scene.start()
        for kills in range(len(places)):
            scene.until_blown(kills + 1)
            server.stop()
            server.start()
        scene.check(sampled_again=(), replayed=0)


@places("agent")
def test_an_agent_that_is_killed_before_or_after_a_record_fails_its_sample_alone(
    places: Sequence[Place], buffer: Buffer, server: EmbeddedServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        group = {"group_size": 2, "min_valid_samples": 1}
        scene = Scene(buffer, server, tmp_path, stack, (), breaks=False, rules=group)
        scene.fuse.kill = scene.kill_agent
        scene.start()
        for kills, place in enumerate(places, start=1):
            scene.fuse.places.add(place)
            scene.world.admit(1)
            scene.until_completed(kills)
        scene.world.world.check()
        answers = scene.answers()
        for (turn, _), (_, samples) in zip(places, scene.world.results(len(places)), strict=True):
            (dead,) = [sample for sample in samples if sample.error]
            (living,) = [sample for sample in samples if not sample.error]
            assert dead.error == "the command ended with exit code 137: begun"
            assert [fact["number"] for fact in dead.extra["calls"]] == list(range(turn + 1))
            assert living.reward == 1.0
            assert scene.answers_in(living) in answers
        seen = [turn for turn, _ in places if turn] + [CALLS] * len(places)  # none at turn 0
        assert sorted(map(len, answers)) == sorted(seen)
        made = [turn + 1 for turn, _ in places] + [CALLS] * len(places)
        assert len(scene.notes.read_text().split()) == sum(made)  # nothing was sampled twice
        assert scene.completed == len(places)
