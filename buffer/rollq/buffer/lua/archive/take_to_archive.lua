-- Returns the next groups for the archive, all of one step, as one numbered portion.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, archiver, lease_ms, most, wait_ms, trouble
--   archiver: a unique name   most: groups in a portion at most
--   wait_ms: for how long groups of a step that is not over yet wait for others, unless there are `most`
--   trouble: why the archiver cannot write the portion that it has, for display; '' while it can
-- Returns: the number of the portion, its step, and the ids of its groups; 0, 0 without one; -1, 0 while another
--   archiver is at work
-- Caller: Archiving.take_to_archive; archivers
-- Repeat: returns the same portion until forget_archived. Its groups never change, so that an archiver that takes over
--   writes the same file again
local MOST_GROUPS = 1000

-- The ids and the step of the next portion; nil while there is none.
local function cut(clock, most, wait_ms, now)
  local leaving = clock.prefix .. 'leaving'
  local first, step = unpack(redis.call('ZRANGE', leaving, 0, 0, 'WITHSCORES'))
  if not first then return nil end
  local ids = redis.call('ZRANGEBYSCORE', leaving, step, step, 'LIMIT', 0, most)
  local waited_ms = now - (tonumber(group_fields(clock, first, 'left_ms') or '') or 0) -- 0: it was changed by hand
  local is_due = tonumber(step) < clock.step or #ids == most or waited_ms < 0 or waited_ms >= wait_ms
  if is_due then return ids, step end
end

local function take_to_archive(keys, args)
  local incarnation, archiver, lease_ms, most, wait_ms, trouble = unpack(args)
  check_given(archiver, trouble)
  check_counts(lease_ms, most, wait_ms)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local archive, now = clock.prefix .. 'archive', now_ms()
  local holder, until_ms, number, step, ids = fields(archive, 'holder', 'until_ms', 'number', 'step', 'ids')
  if holder and holder ~= archiver and is_ahead(until_ms, lease_ms, now) then return { -1, 0 } end
  local found
  if ids then
    found = split(ids)
  else
    found, step = cut(clock, math.min(tonumber(most), MOST_GROUPS), tonumber(wait_ms), now)
    if not found then return { 0, 0 } end
    number = redis.call('HINCRBY', archive, 'number', 1)
    redis.call('HSET', archive, 'step', step, 'ids', table.concat(found, ','))
  end
  redis.call('HSET', archive, 'holder', archiver, 'until_ms', now + lease_ms, 'trouble', trouble)
  return { tonumber(number), tonumber(step), unpack(found) }
end
