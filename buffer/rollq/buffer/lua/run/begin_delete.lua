-- Ends a run that is to be deleted: from now on no role can use it, or create it again, until all of it is gone.
-- Moves: nothing
-- KEYS: run
-- ARGV: incarnation
--   incarnation: of the run, '' for one whose restore did not end
-- Returns: the incarnation that is being deleted
-- Caller: Deletion.delete_run; operators
-- Repeat: returns the same, even to another process after the first process died
local function begin_delete(keys, args)
  local incarnation = unpack(args)
  check_given(incarnation)
  local run = keys[1]
  local existing, restored_as, deleting = fields(run, 'incarnation', 'restored_as', 'deleting')
  if deleting then return deleting end
  if (existing or '') ~= incarnation then return store_lost(run, existing) end
  if not existing and not restored_as then return store_lost(run, existing) end
  redis.call('HSET', run, 'deleting', existing or restored_as)
  redis.call('HDEL', run, 'incarnation', 'restoring')
  return existing or restored_as
end
