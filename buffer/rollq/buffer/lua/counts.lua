-- Where a task stands, in one read.
-- KEYS[1] clock   ARGV incarnation
-- Returns now_ms, ready at the clock's step, outcomes in the window of the keep rate, how many of them kept, clock (flat hash), progress (flat hash), then status, count of each status.
-- Caller: monitor, producer, trainer.   Read only.
local function counts(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local prefix = clock.prefix
  local ready = readiness(clock, clock.step)
  local outcomes, kept = redis.call('LRANGE', prefix .. 'outcomes', 0, -1), 0
  for _, outcome in ipairs(outcomes) do kept = kept + tonumber(outcome) end
  local reply = { now_ms(), ready, #outcomes, kept, redis.call('HGETALL', keys[1]), redis.call('HGETALL', prefix .. 'progress') }
  for _, status in ipairs({ 'pending', 'running', 'completed', 'gathered', 'cooling', 'aborted', 'expired',
    'filtered', 'failed', 'claimed', 'archived' }) do
    reply[#reply + 1] = status
    reply[#reply + 1] = redis.call('ZCARD', prefix .. status)
  end
  return reply
end
