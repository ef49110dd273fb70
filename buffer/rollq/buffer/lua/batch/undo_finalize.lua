-- Gives a batch back, with all its results, after its pipeline has failed (finalizing -> running).
-- Moves: nothing
-- KEYS: clock
-- ARGV: incarnation, handle, nonce
--   nonce: the one that the caller passed to begin_finalize
-- Returns: the batch's state now
-- Caller: Coordination.undo_finalize; coordinators
-- Repeat: finds the batch running, and changes nothing
local function undo_finalize(keys, args)
  local incarnation, handle, nonce = unpack(args)
  check_given(handle, nonce)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local owned, state = disown_batch(clock, handle, nonce)
  if not owned then return state end
  redis.call('HSET', batch_key(clock, handle), 'state', 'running', 'undone', nonce)
  return 'running'
end
