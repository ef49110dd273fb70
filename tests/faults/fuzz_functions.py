"""Calls every Redis function with hostile arguments.

The calls of a golden run are repeated with changed arguments, in the state before and after the move that made them. A
function may refuse a call, but then it must not have written anything; or it may accept it, but then the store must be
sound.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from faults.checker import check_conservation, check_payloads
from faults.dump import Dump, TaskDump, dump_run
from faults.findings import Tally
from faults.mutations import mutate_words
from faults.saved_store import SavedStore
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.library import READ_ONLY, function_name
from rollq.buffer.store.redis_functions import Beside, Call
from support.buffer_run import World
from support.golden_run import GOLDEN_TASKS, golden_run
from support.late_copies import RecordingBuffer, name_of

RUN = "fuzz"
HANGS_AFTER_S = 10.0
CLOCK_NUMBERS = ("epoch", "version", "step", "committed", "claimed_step", "checkpoint", "history")
DIRTY = "rdb_changes_since_last_save"


class EveryCall(RecordingBuffer):
    """Records also the calls that only read."""

    def _record(self, calls: Iterable[Call]) -> None:
        self.recorded += calls


class Fuzzer:
    """Makes hostile calls on a server of its own."""

    def __init__(self, server: EmbeddedServer, seed: int) -> None:
        self.tallies: dict[str, Tally] = {}
        self._server = server
        self._random = random.Random(f"functions {seed}")
        self._client: Any = redis.Redis.from_url(server.url, socket_timeout=HANGS_AFTER_S, retry=Retry(NoBackoff(), 0))
        self._buffer = EveryCall.connect(server.url, RUN)

    def run(self, folder: Path, per_call: int) -> list[Tally]:
        """Make `per_call` hostile calls for each call of the golden run, before and after the move that made it."""
        with self._buffer:
            for before, after, calls in self._moves(folder):
                for store in (before, after):
                    store.restore()
                    for call in calls:
                        for _ in range(per_call):
                            self._call(call, store)
                after.restore()
        return [self.tallies[name] for name in sorted(self.tallies)]

    def _moves(self, folder: Path) -> Iterator[tuple[SavedStore, SavedStore, Sequence[Call]]]:
        """The golden run: for each move the store before and after it, and one call of each function that it called."""
        stores, world, made = [SavedStore(self._client), SavedStore(self._client)], World(self._buffer), 0
        for _ in golden_run(world, folder):
            self._read()
            before, after = stores
            after.keep()
            calls = {name_of(call): call for call in self._buffer.recorded[made:]}
            yield before, after, list(calls.values())
            stores.reverse()
            made = len(self._buffer.recorded)

    def _read(self) -> None:
        """The calls that any role may make at any time."""
        for task in self._buffer.tasks():
            self._buffer.expire(task)
            self._buffer.counts(task)
            self._buffer.inspect(task, 1)
        self._buffer.query({"tries": 1})

    def _call(self, call: Call, store: SavedStore) -> None:
        """Make one hostile call, and judge it."""
        beside = call if isinstance(call, Beside) else Beside(call, {})
        name, key, *sound = beside.call
        words = [_encoded(argument) for argument in sound]
        spared = 0 if self._random.random() < 0.1 else 1  # another incarnation hides all other arguments
        arguments = words[:spared] + mutate_words(self._random, words[spared:])
        tally = self.tallies.setdefault(name, Tally(name))
        try:
            wrote, reply = self._send(name, [key, *beside.payloads], beside.payloads, arguments)
        except redis.TimeoutError:
            tally.add("hangs", arguments, f"no answer within {HANGS_AFTER_S:g} s")
            self._server.kill()
            self._server.start()
            wrote = True
        else:
            tally.add(*self._judge(wrote, reply, arguments))
        if wrote:
            store.restore()

    def _judge(self, wrote: bool, reply: Any, arguments: Sequence[bytes]) -> tuple[str, Sequence[bytes], str]:
        """The verdict, the arguments, and what is wrong, if anything is."""
        if isinstance(reply, Exception) and not wrote:
            return "refused", arguments, ""
        if isinstance(reply, Exception):
            return "half done", arguments, f"it wrote before it failed: {reply}"
        problem = self._problem() if wrote else ""
        return ("wrongly accepted" if problem else "accepted"), arguments, problem

    def _send(
        self, name: str, keys: Sequence[str], payloads: Mapping[str, bytes], arguments: Sequence[bytes]
    ) -> tuple[bool, Any]:
        """Whether a call wrote anything, and its reply. A new payload that was set and removed again is nothing."""
        command = "FCALL_RO" if name in READ_ONLY else "FCALL"
        new = len(payloads) - (self._client.exists(*payloads) if payloads else 0)
        with self._client.pipeline(transaction=bool(payloads)) as pipe:
            pipe.info("persistence")
            for payload_key, payload in payloads.items():
                pipe.set(payload_key, payload, nx=True)
            pipe.execute_command(command, function_name(name), len(keys), *keys, *arguments)
            pipe.info("persistence")
            first, *_, reply, last = pipe.execute(raise_on_error=False)
        return last[DIRTY] - first[DIRTY] != 2 * new, reply

    def _problem(self) -> str:
        """What is wrong with the store now, if anything is."""
        try:
            return next(unsound(dump_run(self._server.url, RUN)), "")
        except ValueError as error:
            return f"the store cannot be read: {error!s:.80}"


def _encoded(argument: Any) -> bytes:
    return argument if isinstance(argument, bytes) else str(argument).encode()


def unsound(dump: Dump) -> Iterator[str]:
    """What is wrong with a store, if anything is."""
    for name, task in dump.tasks.items():
        if not task.clock and name not in GOLDEN_TASKS:
            continue  # listed by a hostile call: the function cannot see a task's clock, which has another hash tag
        for problem in (*check_conservation(task), *check_payloads(task), *_unsound_numbers(task)):
            yield f"task {name}: {problem}"


def _unsound_numbers(task: TaskDump) -> Iterator[str]:
    for status, members in task.sets.items():
        for group_id, score in members.items():
            if not math.isfinite(score):
                yield f"group {group_id} has score {score} in {status}"
    for name, value in task.progress.items():
        if not _is_number(value):
            yield f"progress {name} is {value!r}"

    for name in CLOCK_NUMBERS:
        value = task.clock.get(name, "missing")
        if not value.removeprefix("-").isdecimal():
            yield f"the clock's {name} is {value}"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
