-- Adds new groups to a batch. They count towards the producer's target, but are added even when it leaves no room.
-- Moves: new -> pending
-- KEYS: clock
-- ARGV: incarnation, handle, size_before, closed, then prompts
--   size_before: the batch's size before this call   closed: 1 when these groups are the last
-- Returns: the batch's size now
-- Caller: Batches.fill_batch; coordinators, and the producer for an evaluation
-- Repeat: finds a different size, and adds nothing
local FIRST_PROMPT = 5

local function fill_batch(keys, args)
  local incarnation, handle, size_before, closed = unpack(args, 1, FIRST_PROMPT - 1)
  check_given(handle)
  check_counts(size_before)
  check_choice(closed, '0', '1')
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local batch = batch_key(clock, handle)
  local state, size, is_closed, kind, step = fields(batch, 'state', 'size', 'closed', 'type', 'step')
  if state ~= 'running' then return fail('BATCH_OVER', 'batch %s is %s', handle, state or 'not there') end
  size = tonumber(size)
  if is_closed == '1' or size ~= tonumber(size_before) then return size end
  local count, now = #args - FIRST_PROMPT + 1, now_ms()
  local first_id = redis.call('HINCRBY', clock.prefix .. 'progress', 'admitted', count) - count + 1
  local evaluation = kind == 'eval' and 1 or 0
  for i = 0, count - 1 do
    create_group(clock, first_id + i, tonumber(step), evaluation, now, handle, args[FIRST_PROMPT + i])
    redis.call('RPUSH', batch .. ':groups', first_id + i)
  end
  redis.call('HSET', batch, 'size', size + count, 'closed', closed)
  wake(clock, EVENT.admit)
  return size + count
end
