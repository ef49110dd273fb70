-- running|finalizing -> aborted. Finished groups are kept, as completed, or dropped; work that is queued or under way is
-- dropped: its workers find out when they renew their leases, or put.
-- KEYS[1] clock   ARGV incarnation, handle, reason, keep finished groups 0|1
-- Returns how many groups were dropped.   Caller: coordinator.   A repeat finds it aborted; a finalized batch stays so.
local function abort_batch(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local batch = clock.prefix .. 'batch:' .. args[2]
  local found = redis.call('HMGET', batch, 'state', 'type')
  if found[1] ~= 'running' and found[1] ~= 'finalizing' then return 0 end
  local dropped = 0
  for _, id in ipairs(redis.call('LRANGE', batch .. ':groups', 0, -1)) do
    local key = group_key(clock.prefix, id)
    local group = redis.call('HMGET', key, 'batch', 'status', 'oldest', 'arrival')
    if group[1] == args[2] and group[2] == 'gathered' and args[4] == '1' and found[2] == 'train' then
      redis.call('ZREM', clock.prefix .. 'gathered', id)
      redis.call('HDEL', key, 'batch')
      file_result(clock, id, 'completed', tonumber(group[3]), tonumber(group[4]))
    elseif group[1] == args[2] and (group[2] == 'pending' or group[2] == 'running' or group[2] == 'gathered') then
      redis.call('ZREM', clock.prefix .. group[2], id)
      redis.call('ZREM', clock.prefix .. 'suspects', id)
      redis.call('ZREM', clock.prefix .. 'generating', id)
      drop_group(clock, id, 'cancelled')
      dropped = dropped + 1
    end
  end
  end_batch(clock, args[2], 'aborted', args[3])
  return dropped
end
