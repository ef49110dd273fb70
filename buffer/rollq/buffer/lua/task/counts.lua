-- The state of a task, read at one instant.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation
-- Returns: now_ms, groups ready at the clock's step, outcomes remembered, how many of them were kept, clock (flat
--   hash), progress (flat hash), last error (text and time, or false twice), then per status: its name, its number of
--   groups
-- Caller: Inspection.counts; every role
-- Repeat: only reads
local function counts(keys, args)
  local incarnation = unpack(args)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local prefix = clock.prefix
  local ready = count_ready(clock, clock.step)
  local outcomes, kept = redis.call('LRANGE', prefix .. 'outcomes', 0, -1), 0
  for _, outcome in ipairs(outcomes) do
    kept = kept + tonumber(outcome)
  end
  local progress = redis.call('HGETALL', prefix .. 'progress')
  local last_error = redis.call('HMGET', prefix .. 'last_error', 'text', 'at_ms')
  local reply = { now_ms(), ready, #outcomes, kept, redis.call('HGETALL', clock.key), progress, last_error }
  for _, status in ipairs(STATUSES) do
    append_pair(reply, status, redis.call('ZCARD', prefix .. status))
  end
  return reply
end
