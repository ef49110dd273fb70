-- running past its deadline -> pending as a suspect; failed (quarantined) when it was alone on its last try.
-- KEYS[1] clock   ARGV incarnation, limit
-- Returns requeued, quarantined, held 0|1.   Caller: anyone, about once a second.   Idempotent by state.
--
-- Nobody having reaped for a third of a lease means that the server, or everyone, was away: then leases could not be
-- renewed, and for one more lease nobody is taken for dead.
local function reap(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local now = now_ms()
  redis.call('HSET', keys[1], 'reaped_ms', now)
  if now - clock.reaped_ms > math.max(clock.lease_ms / 3, 3000) then
    redis.call('HSET', keys[1], 'hold_until_ms', now + clock.lease_ms)
    return { 0, 0, 1 }
  end
  if now < clock.hold_until_ms then return { 0, 0, 1 } end
  local requeued, quarantined = 0, 0
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', clock.prefix .. 'running', '-inf', now, 'LIMIT', 0, args[2])) do
    local key = group_key(clock.prefix, id)
    local group = redis.call('HMGET', key, 'deaths', 'alone', 'worker')
    end_lease(clock, id)
    if group[2] == '1' then
      redis.call('HSET', key, 'deaths', clock.max_deaths)
      file_for_audit(clock, id, 'failed', 'quarantined: ' .. clock.max_deaths .. ' workers died with it, the last ('
        .. (group[3] or '?') .. ') while it ran alone')
      quarantined = quarantined + 1
    else
      local deaths = math.min(tonumber(group[1]) + 1, clock.max_deaths - 1)
      redis.call('HSET', key, 'deaths', deaths)
      make_pending(clock, id, deaths)
      requeued = requeued + 1
    end
  end
  if requeued > 0 then
    redis.call('HINCRBY', clock.prefix .. 'progress', 'requeued', requeued)
    redis.call('PUBLISH', clock.events, 'admit')
  end
  return { requeued, quarantined, 0 }
end
