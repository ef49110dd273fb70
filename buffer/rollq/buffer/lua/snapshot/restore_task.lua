-- Restores counters, manifests and batches of a task, and in the last call its clock, which makes the task exist.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, last, then parts
--   incarnation: of the new run   last: 1 for the last call   parts: see write_parts
-- Returns: 1 when they were restored, 0 when the task is restored already
-- Caller: Restoring._restore_task; a restore, when all groups are there
-- Repeat: changes nothing
local function restore_task(keys, args)
  local incarnation, last = unpack(args, 1, 2)
  local clock_key = keys[1]
  local wanted, err = may_restore(clock_key, incarnation)
  if err then return err end
  if not wanted then return 0 end
  redis.call('HSET', clock_key, 'restoring', incarnation)
  write_parts(task_prefix(clock_key), args, 3)
  if last == '1' then
    redis.call('HDEL', clock_key, 'restoring')
    redis.call('HSET', clock_key, 'revision', new_revision()) -- not the snapshot's revision
  end
  return 1
end
