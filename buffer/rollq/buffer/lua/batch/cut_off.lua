-- Asks workers for what they have finished of a batch, before it is finalized. They put the groups of which enough
-- samples are finished, and stop the others, which leave the batch.
-- Moves: pending -> aborted, for groups of a batch that is trained
-- KEYS: clock
-- ARGV: incarnation, handle
-- Returns: how many groups of it workers still have; 0 for a batch that is not running
-- Caller: Coordination.cut_off; coordinators
-- Repeat: counts again
local function cut_off(keys, args)
  local incarnation, handle = unpack(args)
  check_given(handle)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local batch = batch_key(clock, handle)
  local state, kind, is_asked = fields(batch, 'state', 'type', 'cut_off')
  if state ~= 'running' then return 0 end
  redis.call('HSET', batch, 'cut_off', 1)
  local running = 0
  for _, id in ipairs(batch_ids(clock, handle)) do
    local status, of = group_fields(clock, id, 'status', 'batch')
    if of == handle and status == 'running' then
      running = running + 1
    elseif of == handle and status == 'pending' and kind == 'train' then
      leave_batch(clock, id)
    end
  end
  if not is_asked then wake(clock, EVENT.batch) end
  return running
end
