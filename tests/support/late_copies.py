"""Copies of calls that arrive late: the network delivers a call a second time, after its caller has moved on."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.library import READ_ONLY
from rollq.buffer.store.redis_functions import Beside, Call
from support.buffer_run import World
from support.golden_run import golden_run

AT_ANY_TIME = {
    "expire", "reap", "recycle", "take_to_archive", "leave_audit",  # do what is due now, whoever asks
    "take_production", "report_worker", "report_trainer", "append_round",  # for people, or for a broadcast that is over
    "mark",  # nothing reads it
    "join_fleet",  # what a worker can do, for 10 s; groups that no share takes are for everybody after a moment
    "find_garbage", "find_orphans",  # write nothing
    "forget_garbage",  # of payloads that are gone
    "store_weights",  # by content: in the store once, and never instead of the live ones
}  # fmt: skip
"""Functions whose copies do what any other role might do at that moment, or change nothing that a run depends on."""


DEADLINES = {"deadline_ms", "owned_until_ms", "saving_until_ms", "doing"}
REVISIONS = {"revision"}
"""What a write changes that sets fields to what they are."""
COUNTERS = {"duplicates", "refused"}
"""Counts of the copies themselves."""
READ = """
local found = {}
for i, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local kind = redis.call('TYPE', key).ok
  local content
  if kind == 'hash' then content = redis.call('HGETALL', key)
  elseif kind == 'zset' then content = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'list' then content = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'set' then content = redis.call('SMEMBERS', key)
  else content = redis.call('GET', key) end
  found[i] = { key, kind, content }
end
return found
"""


class RecordingBuffer(Buffer):
    """Records every call that may write, in `recorded`, and makes copies of them arrive."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.recorded: list[Call] = []

    def call(self, name: str, key: str, *args: Any) -> Any:
        self._record([(name, key, *args)])
        return super().call(name, key, *args)

    def call_each(self, calls: Callable[[], Iterable[Call]]) -> list[Any]:
        made = list(calls())
        self._record(made)
        return super().call_each(lambda: made)

    def arrive_again(self, copy: Call) -> None:
        """Let a copy of a call arrive. Nobody waits for its reply."""
        super().call_each(lambda: [copy])

    def _record(self, calls: Iterable[Call]) -> None:
        self.recorded += [call for call in calls if name_of(call) not in READ_ONLY]


def writes(buffer: RecordingBuffer) -> int:
    """How often anything was written to the run's servers."""
    servers: Any = buffer.servers.primaries()
    return sum(one.info("persistence")["rdb_changes_since_last_save"] for one in servers)


def name_of(call: Call) -> str:
    """The function that is called."""
    return str(call.call[0] if isinstance(call, Beside) else call[0])


def stored(buffer: RecordingBuffer) -> Mapping[str, Any]:
    """All that a run depends on, by key."""
    servers: Any = buffer.servers.primaries()
    found: dict[str, Any] = {}
    for raw, kind, content in [entry for one in servers for entry in one.eval(READ, 0, f"rollq:{{{buffer.run}*")]:
        key = raw.decode()
        if kind == b"hash":
            fields = {name.decode(): value for name, value in zip(content[::2], content[1::2], strict=True)}
            found[key] = {name: value for name, value in fields.items() if name not in DEADLINES | COUNTERS | REVISIONS}
            if loans := found[key].get("loans"):
                found[key]["loans"] = re.sub(rb"(?m)^(\w+) \d+ ", rb"\1 ", loans)  # without their deadlines
        elif key.endswith(":running"):  # the score is a deadline
            found[key] = sorted(content[::2])
        elif not key.endswith(":garbage") and ":grant:" not in key:  # garbage: payloads that may be collected again
            found[key] = sorted(content) if kind == b"set" else content
    return found


def moves(recorded: RecordingBuffer, world: World, folder: Path) -> Iterator[str]:
    """The golden run, which is lost and restored when it has been saved, with all that is due done after each move."""
    for move in golden_run(world, folder):
        yield from _settled(world, move)
        if move == "save":
            _restore(recorded, world, folder / "saved")
            yield from _settled(world, "restore")


def _settled(world: World, move: str) -> Iterator[str]:
    for task in world.buffer.tasks():
        world.buffer.expire(task)
    yield move


def _restore(recorded: RecordingBuffer, world: World, saved: Path) -> None:
    """All keys are lost, and a task is registered late. The restored run gets a trainer, and goes to where it was."""
    for client in recorded.servers.primaries():
        client.flushdb()
    recorded.arrive_again(next(call for call in recorded.recorded if name_of(call) == "register_task"))
    recorded.restore(saved)
    world.begin(1, launch_id="restored")


def check_copies(recorded: RecordingBuffer, folder: Path) -> set[str]:
    """Let a copy of every call arrive after every later move of the golden run; returns the functions copied.

    Raises AssertionError for a copy that changes something.
    """
    world, copied = World(recorded), set[str]()
    for move in moves(recorded, world, folder):
        before, written = stored(recorded), writes(recorded)
        for call in recorded.recorded[:]:
            if name_of(call) in AT_ANY_TIME:
                continue
            copied.add(name_of(call))
            recorded.arrive_again(call)
            if written != (written := writes(recorded)):  # most copies write nothing
                assert stored(recorded) == before, f"a copy of {call} after {move!r}"
    world.check()
    return copied
