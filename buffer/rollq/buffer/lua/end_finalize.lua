-- finalizing -> finalized, with its groups: gathered -> completed (with the rewards and advantages that the pipeline gave
-- them), filtered or expired; what is not finished goes back to the pool of interrupted groups. Or back to running, when
-- the pipeline failed: nothing has moved then.
-- KEYS[1] clock   ARGV incarnation, handle, caller's nonce, finalized|running, result (JSON), then per gathered group:
-- id, what the pipeline gave it (JSON) or why it is filtered, kept 0|1
-- Returns the state that stands, the result.   Caller: coordinator, who began.   A repeat finds it finalized.
local function end_finalize(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local batch = clock.prefix .. 'batch:' .. args[2]
  local found = redis.call('HMGET', batch, 'state', 'owner', 'result')
  if found[1] ~= 'finalizing' or found[2] ~= args[3] then return { found[1] or 'gone', found[3] or '' } end
  redis.call('HDEL', batch, 'owner', 'owned_until_ms')
  if args[4] == 'running' then
    redis.call('HSET', batch, 'state', 'running')
    return { 'running', '' }
  end
  local stale = {}
  for i = 6, #args, 3 do
    local id = args[i]
    local key = group_key(clock.prefix, id)
    local group = redis.call('HMGET', key, 'status', 'oldest', 'arrival', 'letters', 'versions')
    if group[1] == 'gathered' then
      local oldest = tonumber(group[2])
      redis.call('ZREM', clock.prefix .. 'gathered', id)
      redis.call('HDEL', key, 'batch')
      if args[i + 2] == '0' then
        file_for_audit(clock, id, 'filtered', args[i + 1])
      elseif oldest <= stale_version(clock, clock.step) then
        reset_group(clock, id, stale_version(clock, clock.step))
        stale[#stale + 1], stale[#stale + 2] = group[3], id
      else
        redis.call('HSET', key, 'shaped', args[i + 1])
        file_result(clock, id, 'completed', oldest, tonumber(group[3]))
      end
    end
  end
  if #stale > 0 then file_expired(clock, stale) end
  for _, id in ipairs(redis.call('LRANGE', batch .. ':groups', 0, -1)) do
    if redis.call('HGET', group_key(clock.prefix, id), 'batch') == args[2] then leave_batch(clock, id) end
  end
  end_batch(clock, args[2], 'finalized', args[5])
  return { 'finalized', args[5] }
end
