-- Completes a task's restoring: counters, manifests, batches, and the clock, with which the task exists.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, then parts
--   incarnation: to be   parts: see write_parts
-- Returns: 1 when it was restored, 0 when it was already
-- Caller: Restoring._restore_task; a restore, when all groups are there
-- Repeat: changes nothing
local function restore_task(keys, args)
  local incarnation = unpack(args, 1, 1)
  local clock_key = keys[1]
  local wanted, err = may_restore(clock_key, incarnation)
  if err then return err end
  if not wanted then return 0 end
  write_parts(task_prefix(clock_key), args, 2)
  redis.call('HDEL', clock_key, 'restoring')
  return 1
end
