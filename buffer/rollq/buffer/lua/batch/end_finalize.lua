-- Files the groups of a batch as its pipeline decided, and ends the batch (finalizing -> finalized).
-- Moves: gathered -> completed|filtered|expired; pending|running -> aborted, for groups that are not finished
-- KEYS: clock
-- ARGV: incarnation, handle, nonce, result, then per gathered group: id, outcome, kept
--   nonce: of the caller's begin_finalize   result: JSON
--   outcome: rewards and advantages (JSON) of a group that is kept, else why it is filtered   kept: 1 or 0
-- Returns: the state now, and the result that was kept
-- Caller: Coordination.end_finalize; coordinators
-- Repeat: finds the batch finalized
local FIRST_GROUP = 5

-- Files one gathered group. A group that is too old by now is added to `stale` instead.
local function finalize_group(clock, id, outcome, kept, stale)
  local key, too_old = group_key(clock.prefix, id), stale_version(clock, clock.step)
  local status, arrival, counted_in = fields(key, 'status', 'arrival', 'counted_in')
  if status ~= 'gathered' then return end
  local oldest = oldest_now(clock, id)
  withdraw(clock, id, 'gathered')
  redis.call('HDEL', key, 'batch')
  if kept ~= '1' then
    file_for_audit(clock, id, 'filtered', outcome)
  elseif oldest <= too_old then
    reset_group(clock, id, too_old, cap_of(clock, counted_in))
    append_pair(stale, arrival, id)
  else
    redis.call('HSET', key, 'shaped', outcome)
    file_result(clock, id, 'completed', oldest, tonumber(arrival))
  end
end

local function end_finalize(keys, args)
  local incarnation, handle, nonce, result = unpack(args, 1, FIRST_GROUP - 1)
  check_given(handle, nonce, result)
  check_rows(args, FIRST_GROUP, 3)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local owned, state, kept_result = disown_batch(clock, handle, nonce)
  if not owned then return { state, kept_result } end
  local stale = {}
  for at = FIRST_GROUP, #args, 3 do
    local id, outcome, kept = unpack(args, at, at + 2)
    finalize_group(clock, id, outcome, kept, stale)
  end
  if #stale > 0 then file_expired(clock, stale) end
  for _, id in ipairs(batch_ids(clock, handle)) do
    if group_fields(clock, id, 'batch') == handle then leave_batch(clock, id) end
  end
  end_batch(clock, handle, 'finalized', result)
  return { 'finalized', result }
end
