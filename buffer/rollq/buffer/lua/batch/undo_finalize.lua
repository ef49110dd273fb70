-- Gives a batch back after its pipeline failed (finalizing -> running), with all its results.
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, handle, nonce
--   nonce: of the caller, who began
-- Returns: the state now
-- Caller: Coordination.undo_finalize; coordinators
-- Repeat: finds the batch running
local function undo_finalize(keys, args)
  local incarnation, handle, nonce = unpack(args)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local owned, state = disown_batch(clock, handle, nonce)
  if not owned then return state end
  redis.call('HSET', batch_key(clock, handle), 'state', 'running')
  return 'running'
end
