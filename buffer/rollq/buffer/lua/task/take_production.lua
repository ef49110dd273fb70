-- Takes the sums of production since the last call, and how long groups took. Both start again.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation
-- Returns: now_ms, sums (flat hash, since_ms among them), milliseconds of each group (the last 1000)
-- Caller: Training.take_production; the trainer, rank 0
-- Repeat: after a lost reply finds nothing; these numbers are only for display
local function take_production(keys, args)
  local incarnation = unpack(args)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local window, timings, now = clock.prefix .. 'window', clock.prefix .. 'timings', now_ms()
  local reply = { now, redis.call('HGETALL', window), redis.call('LRANGE', timings, 0, -1) }
  redis.call('DEL', window, timings)
  redis.call('HSET', window, 'since_ms', now)
  return reply
end
