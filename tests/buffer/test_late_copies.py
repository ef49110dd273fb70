"""A copy of a call that arrives late changes nothing, whatever was done since."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.store import library
from rollq.buffer.store.server import EmbeddedServer
from support.buffer_run import World
from support.function_names import FUNCTION_NAMES
from support.golden_run import golden_run
from support.late_copies import AT_ANY_TIME, RecordingBuffer

RESTORING = {"restore_run", "restore_groups", "restore_task", "finish_restore"}
"""Their own tests repeat them."""
DEADLINES = {"deadline_ms", "owned_until_ms", "saving_until_ms"}
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


def stored(buffer: RecordingBuffer) -> Mapping[str, Any]:
    """All that a run depends on, by key."""
    client: Any = buffer.client
    found: dict[str, Any] = {}
    for raw, kind, content in client.eval(READ, 0, f"rollq:{{{buffer.run}*"):
        key = raw.decode()
        if kind == b"hash":
            fields = {name.decode(): value for name, value in zip(content[::2], content[1::2], strict=True)}
            found[key] = {name: value for name, value in fields.items() if name not in DEADLINES | COUNTERS}
        elif key.endswith(":running"):  # the score is a deadline
            found[key] = sorted(content[::2])
        elif ":grant:" not in key:
            found[key] = sorted(content) if kind == b"set" else content
    return found


@pytest.fixture
def recorded(any_server: EmbeddedServer, run_name: str) -> Iterator[RecordingBuffer]:
    with RecordingBuffer.connect(any_server.url, run_name) as buffer:
        yield buffer


def moves(world: World, folder: Path) -> Iterator[str]:
    """The golden run, with all that is due done after each move."""
    for move in golden_run(world, folder):
        for task in world.buffer.tasks():
            world.buffer.expire(task)
        yield move


def test_a_copy_of_any_call_that_arrives_after_any_later_move_changes_nothing(
    recorded: RecordingBuffer, tmp_path: Path
) -> None:
    world, made = World(recorded), set[str]()
    for move in moves(world, tmp_path):
        before = stored(recorded)
        for name, *args in recorded.recorded[:]:
            if name in AT_ANY_TIME:
                continue
            made.add(name)
            recorded.arrive_again((name, *args))
            assert stored(recorded) == before, f"a copy of {name} {args} after {move!r}"
    world.check()
    assert made == FUNCTION_NAMES - library.READ_ONLY - AT_ANY_TIME - RESTORING
