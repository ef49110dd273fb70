-- Ends a batch without a result (running|finalizing -> aborted). Unfinished groups are dropped; their workers learn of
-- it when they renew their leases, or put.
-- Moves: gathered -> completed, for finished groups that are kept; else pending|running|gathered -> dropped, and
--   aborted -> dropped, for groups that left the batch when it was cut off
-- KEYS: clock
-- ARGV: incarnation, handle, reason, keep_finished, limit
--   keep_finished: 1 to keep finished groups, of a batch that is trained
-- Returns: more 0|1 (1: call again), and how many groups were dropped
-- Caller: Coordination.abort_batch; coordinators
-- Repeat: finds it aborted; a finalized batch stays finalized
local function abort_group(clock, handle, id, keeps)
  local batch, status, arrival, left = group_fields(clock, id, 'batch', 'status', 'arrival', 'left_batch')
  local is_left = left == handle and status == 'aborted'
  local is_mine = batch == handle and (status == 'gathered' or is_unfinished(status))
  if not is_mine and not is_left then return 0 end
  withdraw(clock, id, status)
  if status == 'gathered' and keeps then
    redis.call('HDEL', group_key(clock.prefix, id), 'batch')
    file_result(clock, id, 'completed', oldest_now(clock, id), tonumber(arrival))
    return 0
  end
  drop_group(clock, id, 'cancelled')
  return 1
end

local function abort_batch(keys, args)
  local incarnation, handle, reason, keep_finished, limit = unpack(args)
  check_given(handle, reason)
  check_choice(keep_finished, '0', '1')
  check_counts(limit)
  local clock, err = read_clock(keys[1], incarnation)
  if err then return err end
  local batch = batch_key(clock, handle)
  local state, kind, aborting = fields(batch, 'state', 'type', 'aborting')
  if state ~= 'running' and state ~= 'finalizing' and not aborting then return { 0, 0 } end
  -- others see it aborted at once
  if not aborting then redis.call('HSET', batch, 'state', 'aborted', 'result', reason, 'aborting', 1) end
  local keeps, dropped = keep_finished == '1' and kind == 'train', 0
  local ids = redis.call('LPOP', batch .. ':groups', limit) or {}
  for _, id in ipairs(ids) do
    dropped = dropped + abort_group(clock, handle, id, keeps)
  end
  if #ids == tonumber(limit) then return { 1, dropped } end
  redis.call('HDEL', batch, 'aborting')
  end_batch(clock, handle, 'aborted', reason)
  return { 0, dropped }
end
