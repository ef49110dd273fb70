-- Ends an evaluation: its groups are dropped, finished or not, and counted.
-- KEYS[1] clock   ARGV incarnation, handle, limit, result (JSON)
-- Returns more 0|1: call again, and the result that stands.   Caller: trainer, coordinator.   Idempotent by state.
local function close_evaluation(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local batch = clock.prefix .. 'batch:' .. args[2]
  if redis.call('HGET', batch, 'state') ~= 'running' then
    return { 0, redis.call('HGET', batch, 'result') or '' }
  end
  redis.call('HSETNX', batch, 'result', args[4])
  redis.call('HSET', batch, 'closed', 1) -- no producer adds to it any more
  local ids = redis.call('LPOP', batch .. ':groups', args[3]) or {}
  for _, id in ipairs(ids) do
    local status = redis.call('HGET', group_key(clock.prefix, id), 'status')
    if status then
      for _, set in ipairs({ status, 'suspects', 'generating' }) do redis.call('ZREM', clock.prefix .. set, id) end
      drop_group(clock, id, (status == 'pending' or status == 'running') and 'cancelled' or 'evaluated')
    end
  end
  if #ids == tonumber(args[3]) then return { 1, '' } end
  local result = redis.call('HGET', batch, 'result')
  end_batch(clock, args[2], 'finalized', result)
  return { 0, result }
end
