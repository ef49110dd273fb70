-- completed, aborted that are too old -> expired or dropped. Only tidies up: claim and readiness never count them.
-- KEYS[1] clock   ARGV incarnation, limit
-- Returns expired, dropped, more 0|1.   Caller: anyone.   Idempotent by state.
local function expire(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local stale, limit = stale_version(clock, clock.step), tonumber(args[2])
  local ids = redis.call('ZRANGEBYSCORE', clock.prefix .. 'by_version', '-inf', stale, 'LIMIT', 0, limit)
  local expired, dropped = 0, 0
  for _, id in ipairs(ids) do
    local key = group_key(clock.prefix, id)
    local group = redis.call('HMGET', key, 'status', 'letters', 'versions', 'arrival')
    unfile_result(clock, id, group[1])
    if clock.expired ~= 'drop' then
      local letters, versions, reset = reset_stale(clock, group[2], group[3], stale)
      if string.find(letters, '[^p]') then
        redis.call('HDEL', rollout_key(clock.prefix, id), unpack(reset))
      else
        redis.call('UNLINK', rollout_key(clock.prefix, id))
      end
      redis.call('HSET', key, 'letters', letters, 'versions', versions)
    end
    if file_expired(clock, id, tonumber(group[4])) == 'dropped' then dropped = dropped + 1 else expired = expired + 1 end
  end
  if #ids > 0 then redis.call('PUBLISH', clock.events, 'expire') end
  return { expired, dropped, #ids == limit and 1 or 0 }
end
