-- Where a task stands, in one read.
-- KEYS[1] clock   ARGV incarnation
-- Returns now_ms, ready at the clock's step, clock (flat hash), progress (flat hash), then status, count of each status.
-- Caller: monitor, producer, trainer.   Read only.
local function counts(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local prefix, stale = clock.prefix, stale_version(clock, clock.step)
  local ready
  if clock.order == 'fifo' then
    -- stale groups of both kinds are in one index; those not swept yet are few, and counted as not ready
    ready = math.max(0, redis.call('ZCARD', prefix .. 'completed') - redis.call('ZCOUNT', prefix .. 'by_version', '-inf', '(' .. stale_bound(stale)))
  else
    ready = redis.call('ZCOUNT', prefix .. 'completed', stale_bound(stale), '+inf')
  end
  local reply = { now_ms(), ready, redis.call('HGETALL', keys[1]), redis.call('HGETALL', prefix .. 'progress') }
  for _, status in ipairs({ 'pending', 'running', 'completed', 'aborted', 'expired', 'filtered', 'failed', 'claimed', 'archived' }) do
    reply[#reply + 1] = status
    reply[#reply + 1] = redis.call('ZCARD', prefix .. status)
  end
  return reply
end
