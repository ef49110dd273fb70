"""Very many completed groups, made inside the server: what matters is how many there are, not what they hold."""

from collections.abc import Iterable

from tqdm import tqdm

from benchmarks.world import TASK
from rollq.buffer.core import task_keys
from rollq.buffer.replay import Buffer

GROUPS_PER_CALL = 5_000
FILL = """#!lua name=bench_fill
-- KEYS[1] clock   ARGV first id, last id, version of their tokens, samples of a group
-- Leaves what admit, lease and put would have left of these groups, with frames of a few bytes.
redis.register_function('bench_fill', function(keys, args)
  local prefix = string.sub(keys[1], 1, -6)
  local version, size = tonumber(args[3]), tonumber(args[4])
  local versions, frames = string.sub(string.rep(',' .. version, size), 2), {}
  for index = 0, size - 1 do
    frames[#frames + 1] = index
    frames[#frames + 1] = 'frame'
  end
  for id = tonumber(args[1]), tonumber(args[2]) do
    redis.call('HSET', prefix .. 'group:' .. id, 'status', 'completed', 'arrival', id, 'attempt', 1, 'tries', 1,
      'deaths', 0, 'step', 1, 'eval', 0, 'letters', string.rep('c', size), 'versions', versions, 'oldest', version,
      'newest', version, 'reward', 0.5, 'tokens', 1024, 'prompt', '{}')
    redis.call('HSET', prefix .. 'rollout:' .. id, unpack(frames))
    redis.call('ZADD', prefix .. 'completed', version * 4294967296 + id, id)
    redis.call('ZADD', prefix .. 'by_version', version, id)
  end
  redis.call('HINCRBY', prefix .. 'progress', 'admitted', args[2] - args[1] + 1)
end)
"""


def fill(buffer: Buffer, layers: Iterable[tuple[int, int]], group_size: int) -> None:
    """Add completed groups: `layers` are (version, how many)."""
    # a rewrite of the append-only file would start in the middle of what is measured
    buffer.client.config_set("auto-aof-rewrite-percentage", 0)
    buffer.client.function_load(FILL, replace=True)
    clock = task_keys(buffer.run, TASK).clock
    last = int(buffer.counts(TASK).progress["admitted"])
    calls = []
    for version, count in layers:
        for first in range(last + 1, last + count + 1, GROUPS_PER_CALL):
            calls.append((first, min(first + GROUPS_PER_CALL - 1, last + count), version))
        last += count
    with tqdm(total=last, unit=" groups", desc="filling", leave=False, disable=None if len(calls) > 5 else True) as bar:
        for first, final, version in calls:
            buffer.client.fcall("bench_fill", 1, clock, str(first), str(final), str(version), str(group_size))
            bar.update(final - first + 1)
