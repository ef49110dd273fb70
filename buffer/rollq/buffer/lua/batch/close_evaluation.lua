-- Ends an evaluation (running -> finalized): its groups, finished or not, are dropped and counted.
-- Moves: any status -> dropped
-- KEYS: clock
-- ARGV: incarnation, handle, limit, result
--   result: JSON
-- Returns: more 0|1 (1: call again), and the result of the first caller
-- Caller: Evaluations.close_evaluation; the trainer, and coordinators
-- Repeat: returns the result of the first caller
local function close_evaluation(keys, args)
  local incarnation, handle, limit, result = unpack(args)
  check_given(handle, result)
  check_counts(limit)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local batch = batch_key(clock, handle)
  local state, first_result = fields(batch, 'state', 'result')
  if state ~= 'running' then return { 0, first_result or '' } end
  if not first_result then redis.call('HSET', batch, 'result', result) end
  redis.call('HSET', batch, 'closed', 1) -- the producer adds nothing more
  local ids = redis.call('LPOP', batch .. ':groups', limit) or {}
  for _, id in ipairs(ids) do
    local status = group_fields(clock, id, 'status')
    if not is_gone(status) then
      withdraw(clock, id, status)
      drop_group(clock, id, is_unfinished(status) and 'cancelled' or 'evaluated')
    end
  end
  if #ids == tonumber(limit) then return { 1, '' } end
  end_batch(clock, handle, 'finalized', first_result or result)
  return { 0, first_result or result }
end
