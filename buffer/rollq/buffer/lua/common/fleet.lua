-- What all workers can do together: sums that each report changes, so that no call looks at every worker.
--
-- The hash `fleet` has a field for each worker that takes groups, 'places load tokens_per_s', and under FLEET_SUMS the
-- sums. A speed of 0 is one that is not known yet: such a worker's places are new ones. The sorted set `fleet_seen` says
-- when each worker has reported last.

local FLEET_SUMS = '+' -- no worker's name has it

-- The sums: workers, measured places, tokens per second, new places, load.
local function fleet_sums(prefix)
  local sums = {}
  for number in string.gmatch(redis.call('HGET', prefix .. 'fleet', FLEET_SUMS) or '0 0 0 0 0', '%d+') do
    sums[#sums + 1] = tonumber(number)
  end
  return sums
end

-- Adds a worker's part of the fleet to the sums, or takes it away.
local function add_to_sums(sums, part, sign)
  local places, load, speed = string.match(part, '(%d+) (%d+) (%d+)')
  sums[1], sums[5] = sums[1] + sign, sums[5] + sign * load
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
