-- Asks workers for what they have finished of a batch, before it is finalized. They put the groups that have enough
-- finished samples, and stop the others, which leave the batch.
-- Moves: pending -> aborted, for groups of a training batch that have too few finished samples
-- KEYS: clock
-- ARGV: incarnation, handle
-- Returns: how many of its groups are still to come: running, or pending with enough finished samples; 0 for a batch
--   that is not running, or whose groups need all their samples
-- Caller: Coordination.cut_off; coordinators
-- Repeat: counts again
local function has_enough(clock, letters)
  local _, completed = string.gsub(letters, SAMPLE.completed, '')
  return completed >= clock.min_valid
end

local function cut_off(keys, args)
  local incarnation, handle = unpack(args)
  check_given(handle)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local batch = batch_key(clock, handle)
  local state, kind, is_asked = fields(batch, 'state', 'type', 'cut_off')
  if state ~= 'running' or clock.min_valid == clock.group_size then return 0 end
  redis.call('HSET', batch, 'cut_off', 1)
  local awaited = 0
  for _, id in ipairs(batch_ids(clock, handle)) do
    local status, of, letters = group_fields(clock, id, 'status', 'batch', 'letters')
    if of == handle and (status == 'running' or status == 'pending' and has_enough(clock, letters)) then
      awaited = awaited + 1
    elseif of == handle and status == 'pending' and kind == 'train' then
      note_left(clock, id, handle)
      leave_batch(clock, id)
    end
  end
  if not is_asked then wake(clock, EVENT.batch) end
  return awaited
end
