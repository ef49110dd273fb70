-- The end of restoring: the run exists, with the fences and the history of its snapshot, and without a trainer.
-- KEYS[1] run hash   ARGV incarnation, digest of the snapshot, then parts of the run as in restore_task, then '' and the
--   names of its tasks
-- Returns 1 done, 0 it was already.   Caller: Buffer.restore, when all tasks are there.   A repeat changes nothing.
local function restored(keys, args)
  local found = redis.call('HMGET', keys[1], 'incarnation', 'restoring')
  if found[1] == args[1] then return 0 end
  if found[2] ~= args[2] then return fail('RUN_MISMATCH', 'the run is not being restored from this snapshot any more') end
  local prefix = string.sub(keys[1], 1, -4)
  local at = write_parts(prefix, args, 3)
  for i = at + 1, #args do redis.call('SADD', prefix .. 'tasks', args[i]) end
  redis.call('HDEL', keys[1], 'restoring', 'restored_as')
  return 1
end
