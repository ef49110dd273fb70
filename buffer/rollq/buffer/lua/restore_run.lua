-- Reserves a run that does not exist for one snapshot: until open_restored ends the restoring, no role can start.
-- KEYS[1] run hash   ARGV incarnation to be, digest of the snapshot
-- Returns the incarnation that counts.   Caller: Buffer.restore.
-- A repeat, also by another process after the first one died, returns the same incarnation and goes on.
local function restore_run(keys, args)
  local found = redis.call('HMGET', keys[1], 'incarnation', 'restoring', 'restored_as')
  if found[1] then
    return fail('RUN_MISMATCH', 'the run exists here already: a snapshot is restored into a run that does not, so give it '
      .. 'another name (--run), or use an empty server')
  end
  if found[2] and found[2] ~= args[2] then
    return fail('RUN_MISMATCH', 'another snapshot was being restored here and did not end: repeat that one, or give the run '
      .. 'another name (--run)')
  end
  if found[2] then return found[3] end
  redis.call('HSET', keys[1], 'restoring', args[2], 'restored_as', args[1])
  return args[1]
end
