"""The functions with a check of every clock that they read: what the server keeps of it is what is stored."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from rollq.buffer.store import library, redis_functions

PLACE = "-- Like read_clock, for the trainer"
CHECK = """
local unchecked = read_clock
read_clock = function(key, incarnation)
  local clock, err = unchecked(key, incarnation)
  if err then return nil, err end
  local stored, flat = { prefix = true, key = true, view = true }, redis.call('HGETALL', key)
  for i = 1, #flat, 2 do
    stored[flat[i]] = true
    if clock[flat[i]] ~= clock_value(flat[i], flat[i + 1]) then
      error('clock.' .. flat[i] .. ' is kept as ' .. tostring(clock[flat[i]]) .. ', and stored as ' .. flat[i + 1])
    end
  end
  for name, value in pairs(clocks[key]) do
    if value and not stored[name] then error('clock.' .. name .. ' is kept, and not stored') end
  end
  return clock
end

"""


@contextmanager
def checked_clocks() -> Iterator[None]:
    """Load the functions with the check into servers that have none yet. A call that finds a difference is refused."""
    source = library.library_source()
    if source.count(PLACE) != 1:
        raise ValueError(f"the functions contain {PLACE!r} {source.count(PLACE)} times")
    with mock.patch.object(redis_functions, "library_source", return_value=source.replace(PLACE, CHECK + PLACE)):
        yield
