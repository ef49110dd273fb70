-- New groups of a batch -> pending. They count towards the run-ahead bound, but do not wait for it.
-- KEYS[1] clock   ARGV incarnation, handle, size of the batch before, closed 0|1: these are the last, then prompts
-- Returns the batch's size now.   Caller: coordinator; producer, for an evaluation.
-- A repeat finds another size and adds nothing.
local function fill_batch(keys, args)
  local clock, err = read_clock(keys[1], args[1])
  if err then return err end
  local batch = clock.prefix .. 'batch:' .. args[2]
  local found = redis.call('HMGET', batch, 'state', 'size', 'closed', 'type', 'step')
  if found[1] ~= 'running' then return fail('BATCH_OVER', 'batch ' .. args[2] .. ' is ' .. (found[1] or 'not there')) end
  local size = tonumber(found[2])
  if found[3] == '1' or size ~= tonumber(args[3]) then return size end
  local count, now = #args - 4, now_ms()
  local first = redis.call('HINCRBY', clock.prefix .. 'progress', 'admitted', count) - count + 1
  local evaluation = found[4] == 'eval' and 1 or 0
  for i = 0, count - 1 do
    create_group(clock, first + i, tonumber(found[5]), evaluation, now, args[2], args[5 + i])
    redis.call('RPUSH', batch .. ':groups', first + i)
  end
  redis.call('HSET', batch, 'size', size + count, 'closed', args[4])
  redis.call('PUBLISH', clock.events, 'admit')
  return size + count
end
