-- Notes what a worker can do, and says what all workers can do that have done so lately.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, worker, places, load, tokens_per_s
--   places: samples that it can generate at a time, 0 when it takes no groups   load: those that it has in flight, in
--   the mean   tokens_per_s: 0 when it is not known
-- Returns: how many workers take groups, the places of those whose speed is known, their speed, the places of the
--   others, the load of all
-- Caller: Leasing.join_fleet; workers, every second
-- Repeat: writes the same again
local SILENT_MS = 10000
local LOOKED_AT = 100

local function join_fleet(keys, args)
  local incarnation, worker, places, load, tokens_per_s = unpack(args)
  check_given(worker)
  check_counts(places, load, tokens_per_s)
  local prefix, err = read_run(keys[1], incarnation)
  if err then return err end
  local sums, now = fleet_sums(prefix), now_ms()
  -- stylua: ignore
  local silent = redis.call('ZRANGEBYSCORE', prefix .. 'fleet_seen', '-inf', exact(now - SILENT_MS), 'LIMIT', 0,
    LOOKED_AT)
  for _, name in ipairs(silent) do
    leave_fleet(prefix, sums, name)
  end
  leave_fleet(prefix, sums, worker)
  if places ~= '0' then
    local part = table.concat({ places, load, tokens_per_s }, ' ')
    add_to_sums(sums, part, 1)
    redis.call('HSET', prefix .. 'fleet', worker, part)
    redis.call('ZADD', prefix .. 'fleet_seen', now, worker)
  end
  write_fleet_sums(prefix, sums)
  return sums
end
