-- Notes what a worker can do, and returns the capacity of all workers that have noted theirs lately.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, worker, places, load, tokens_per_s, open
--   places: samples that it can generate at a time, 0 when it takes no groups   load: samples in flight on average
--   tokens_per_s: 0 when it is not known   open: samples that it has to generate now
-- Returns: how many workers take groups, the places of those whose speed is known, their speed, the places of the
--   others, the load of all, the open samples of all
-- Caller: Leasing.join_fleet; workers, every second
-- Repeat: writes the same again
--
-- Each report changes sums, so that no call reads every worker. The hash `fleet` has a field for each worker that
-- takes groups, 'places load tokens_per_s open', and the sums under FLEET_SUMS. A speed of 0 is still unknown: such a
-- worker's places count as new. The sorted set `fleet_seen` has the time of each worker's last report.
local FLEET_SUMS = '+' -- no worker's name has it

-- The sums: workers, measured places, tokens per second, new places, load, open samples.
local function fleet_sums(prefix)
  local sums = {}
  for number in string.gmatch(redis.call('HGET', prefix .. 'fleet', FLEET_SUMS) or '0 0 0 0 0 0', '%d+') do
    sums[#sums + 1] = tonumber(number)
  end
  return sums
end

-- Adds a worker's part of the fleet to the sums, or takes it away.
local function add_to_sums(sums, part, sign)
  local places, load, speed, open = string.match(part, '(%d+) (%d+) (%d+) (%d+)')
  sums[1], sums[5], sums[6] = sums[1] + sign, sums[5] + sign * load, sums[6] + sign * open
  if speed == '0' then
    sums[4] = sums[4] + sign * places
  else
    sums[2], sums[3] = sums[2] + sign * places, sums[3] + sign * speed
  end
end

-- Takes a worker out of the fleet. The caller writes the sums.
local function leave_fleet(prefix, sums, worker)
  local part = redis.call('HGET', prefix .. 'fleet', worker)
  if not part then return end
  add_to_sums(sums, part, -1)
  redis.call('HDEL', prefix .. 'fleet', worker)
  redis.call('ZREM', prefix .. 'fleet_seen', worker)
end

local function write_fleet_sums(prefix, sums)
  local words = {}
  for i, number in ipairs(sums) do
    words[i] = exact(number)
  end
  redis.call('HSET', prefix .. 'fleet', FLEET_SUMS, table.concat(words, ' '))
end

local SILENT_MS = 10000
local LOOKED_AT = 100

local function join_fleet(keys, args)
  local incarnation, worker, places, load, tokens_per_s, open = unpack(args)
  check_given(worker)
  check_counts(places, load, tokens_per_s, open)
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
    local part = table.concat({ places, load, tokens_per_s, open }, ' ')
    add_to_sums(sums, part, 1)
    redis.call('HSET', prefix .. 'fleet', worker, part)
    redis.call('ZADD', prefix .. 'fleet_seen', now, worker)
  end
  write_fleet_sums(prefix, sums)
  return sums
end
