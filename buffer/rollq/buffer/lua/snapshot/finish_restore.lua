-- Ends a restore: the run exists, with the fences and the history of its snapshot, and without a trainer.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation, digest, then parts
--   digest: of the snapshot   parts: of the run, see write_parts; then '' and the names of its tasks
-- Returns: 1 when it was finished, 0 when it was already
-- Caller: Restoring._finish_restore; a restore, when all tasks are there
-- Repeat: changes nothing
local function finish_restore(keys, args)
  local incarnation, digest = unpack(args, 1, 2)
  local run = keys[1]
  local existing, restoring = fields(run, 'incarnation', 'restoring')
  if existing == incarnation then return 0 end
  if restoring ~= digest then
    return fail('RUN_MISMATCH', 'the run is not being restored from this snapshot any more')
  end
  local prefix = run_prefix(run)
  local separator = write_parts(prefix, args, 3)
  for i = separator + 1, #args do
    redis.call('SADD', prefix .. 'tasks', args[i])
  end
  redis.call('HDEL', run, 'restoring', 'restored_as')
  return 1
end
