-- Returns facts of a task that monitors show beside its counts. The work does not depend on the number of groups.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, rows
--   rows: how many of the newest rows of the history
-- Returns: now_ms, when the task was last reaped (ms), rows of the history (see `HistoryRow`), the ready groups of each
--   staleness of the oldest token from 0 (the last number counts all that are staler), and since when (ms) these wait:
--   the pending group that is leased next, the group in generation that was leased first, and the ready group that is
--   trained next; 0 without any; and the location of each producer, with the time (ms) at which it was last seen
-- Caller: Inspection.overview; every role
-- Repeat: only reads
local MOST_STALENESS = 32
local LOOKED_AT = 64 -- groups in generation, those with the oldest weights

local MOST_LOOKED_AT = 1000 -- ready groups that are counted by their tokens

-- Where tokens are masked by age, a group may count as older than its oldest token. Counts such groups by that token.
local function count_by_tokens(clock, set, counts)
  local function place(version)
    return math.max(0, math.min(clock.step - 1 - version, #counts - 1)) + 1
  end
  local lowest = stale_bound(stale_version(clock, clock.step))
  local found = redis.call('ZRANGEBYSCORE', set, lowest, '+inf', 'WITHSCORES', 'LIMIT', 0, MOST_LOOKED_AT)
  for i = 1, #found, 2 do
    local counted = math.floor(tonumber(found[i + 1]) / ARRIVALS)
    local before, after = place(counted), place(oldest_token(clock, found[i], clock.floors))
    counts[before] = counts[before] - 1
    counts[after] = counts[after] + 1
  end
end

local function count_by_staleness(clock)
  local set = clock.prefix .. (sorts_by_version(clock) and 'completed' or 'by_version')
  local counts, bound = {}, '+inf'
  for staleness = 0, math.min(clock.threshold, MOST_STALENESS) - 1 do
    local is_last = staleness == MOST_STALENESS - 1
    local oldest = is_last and stale_version(clock, clock.step) + 1 or clock.step - staleness - 1
    local from = exact(version_score(oldest, 0))
    counts[#counts + 1] = redis.call('ZCOUNT', set, from, bound)
    bound = '(' .. from
  end
  if counts_masked(clock) then count_by_tokens(clock, set, counts) end
  return counts
end

local function since(clock, ids, field)
  local first = 0
  for _, id in ipairs(ids) do
    local at = tonumber((group_fields(clock, id, field))) or 0
    if at > 0 and (first == 0 or at < first) then first = at end
  end
  return first
end

local function overview(keys, args)
  local incarnation, rows = unpack(args)
  check_counts(rows)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local prefix = clock.prefix
  local fresh = sorts_by_version(clock) and stale_bound(stale_version(clock, clock.step)) or '-inf'
  return {
    now_ms(),
    clock.reaped_ms,
    redis.call('LRANGE', prefix .. 'history', -math.max(1, tonumber(rows)), -1),
    count_by_staleness(clock),
    since(clock, redis.call('ZRANGE', prefix .. 'pending', 0, 0), 'admitted_ms'),
    since(clock, redis.call('ZRANGE', prefix .. 'generating', 0, LOOKED_AT - 1), 'leased_ms'),
    since(clock, redis.call('ZRANGEBYSCORE', prefix .. 'completed', fresh, '+inf', 'LIMIT', 0, 1), 'put_ms'),
    redis.call('HGETALL', prefix .. 'producers'),
  }
end
